"""The only way to a target: its features, its own logits, its output head and fingerprint."""

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data.config import TargetConfig
from data.memory import keep_freed_pages
from data.processes import process_state
from data.targets.checkpoint_files import explained, locate
from data.targets.families import load_config, load_tokenizer, model_class, target_dtype
from data.targets.fingerprint import fingerprint, fingerprint_differences
from data.targets.head import TargetHead, head_of, read_target_head

__all__ = [
    "Target",
    "TargetHead",
    "check_launch",
    "check_output_head",
    "fingerprint",
    "fingerprint_differences",
    "load_config",
    "load_target",
    "load_tokenizer",
    "read_target_head",
    "target_device",
    "target_dtype",
]

log = logging.getLogger(__name__)

# Largest difference from the target's own logits, as a share of the largest logit: our scale and
# cap are applied in float32, the target's in its own dtype.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Target:
    """A frozen target, ready to run."""

    model: Any  # a Transformers causal language model
    tokenizer: Any
    head: TargetHead
    device: torch.device  # where inputs go and features come from, wherever the layers lie
    dtype: torch.dtype
    fingerprint: dict[str, str]

    @property
    def place(self) -> str:
        """Where it runs, for people."""
        return str(self.device)

    @torch.no_grad()
    def features(self, input_ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """What the output head reads, after the final norm.

        input_ids: [B, T]     padded on the right
        lengths:   [B]        real tokens of each row; features beyond them mean nothing
        returns    [B, T, H]

        Only the backbone runs. Attention is causal, so the padding needs no mask and `lengths` is
        for engines that leave the padding out.
        """
        backbone = self.model.get_decoder()
        return backbone(input_ids=input_ids, use_cache=False).last_hidden_state.to(self.device)

    @torch.no_grad()
    def own_logits(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The target's own logits, of all tokens or of the K likeliest.

        input_ids: [B, T]
        returns    token ids [B, T, K] int64, and their logits [B, T, K] float32
        """
        logits = self.model(input_ids=input_ids, use_cache=False).logits.float().to(self.device)
        return torch.arange(logits.shape[-1], device=self.device).expand(logits.shape), logits


def check_launch(config: TargetConfig, num_processes: int) -> None:
    """Raises ValueError if each of several processes would take all GPUs for its own target."""
    if num_processes == 1:
        return
    setting = "target.device_map" if config.device_map else "target.engine=vllm"
    if config.device_map or config.engine == "vllm":
        raise ValueError(
            f"{setting} spreads one target over the GPUs, but {num_processes} processes were "
            "launched, and each would take them all. Start one process (`python -m scripts.NAME`)"
            + ("." if config.device_map else "; target.tensor_parallel=N gives it N GPUs.")
        )


def load_target(config: TargetConfig) -> Target:
    """Load the whole target with Transformers, over several GPUs if `device_map` says so.

    Raises ValueError if the files lack some of its weights, or if it does not fit into memory.
    """
    if config.device_map:
        check_launch(config, process_state().num_processes)
    location = locate(config)
    loaded = load_config(config)
    dtype, device = target_dtype(config, loaded), target_device(config)
    keep_freed_pages(device)
    arguments: dict[str, Any] = dict(location.arguments)
    if getattr(loaded.get_text_config(), "attn_logit_softcapping", None) is not None:
        # Gemma 2: the fused attention of PyTorch leaves the cap of its attention logits out.
        arguments["attn_implementation"] = "eager"
    with explained(location, "weights"):
        loading: Any = model_class(loaded).from_pretrained(
            location.path,
            dtype=dtype,
            device_map=config.device_map or {"": device},
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            **arguments,
        )
    model, info = loading
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ValueError(
            f"The files of {config.path} lack {len(missing)} of its weights, which would start "
            f"at random values: {', '.join(missing[:8])}. Check that the checkpoint is complete "
            "and that tie_word_embeddings in its config.json is right."
        )
    _check_places(config, model, device)
    model.requires_grad_(False).eval()
    matrices = (model.get_input_embeddings(), model.get_output_embeddings())
    offloaded = any(getattr(matrix, "weight", torch.empty(0)).is_meta for matrix in matrices)
    head = read_target_head(config) if offloaded else head_of(model)
    return Target(
        model=model,
        tokenizer=load_tokenizer(config),
        head=head.to(device),
        device=device,
        dtype=dtype,
        fingerprint=fingerprint(config),
    )


def _check_places(config: TargetConfig, model: Any, device: torch.device) -> None:
    """Say where the layers of a spread target lie, and refuse those that lie on the disk."""
    places = {} if config.device_map is None else getattr(model, "hf_device_map", {})
    counts = Counter(str(place) for place in places.values())
    where = ", ".join(f"{count} on {place}" for place, count in counts.items())
    if "disk" in counts:
        raise ValueError(
            f"{config.path} does not fit into the memory of the GPUs and the host (parts of it: "
            f"{where}), and its weights would be read from the disk for every batch. Use more "
            "GPUs, a smaller dtype (target.dtype=bfloat16), or a quantised copy if one is served."
        )
    if places:
        log.info("target: parts of it by device: %s", where)
    if "cpu" in counts and device.type != "cpu":
        log.warning(
            "target: the parts on the CPU are copied to the GPU for every batch. Larger "
            "batch_tokens make that cheaper; more GPUs make it unnecessary."
        )


@torch.no_grad()
def check_output_head(target: Target, input_ids: Tensor) -> None:
    """Check that head and features give the target's own logits.

    input_ids: [B, T]  right-padded; at most 2 x 256 of them are used

    Raises ValueError with an explanation otherwise: a wrong layer, a missing final norm, a
    multiplier, a wrapped or a quantised model all show here.
    """
    input_ids = input_ids[:2, :256].to(target.device)
    tokens, theirs = target.own_logits(input_ids)  # [B, T, K]
    all_ours = target.head.logits(target.features(input_ids))  # [B, T, V]
    if tokens.amax() >= all_ours.shape[-1]:
        raise ValueError(
            f"The output head gives {all_ours.shape[-1]} logits, the target itself at least "
            f"{int(tokens.amax()) + 1}. {_HINT}"
        )
    ours = all_ours.gather(-1, tokens)  # [B, T, K]
    allowed = TOLERANCE[target.dtype] * theirs.abs().amax().item()
    difference = (ours - theirs).abs().amax().item()
    # Where the argmax differs, the two candidates must be as good as equal in the target's eyes,
    # and in ours if the target does not name our candidate.
    chosen = theirs.gather(-1, ours.argmax(-1, keepdim=True))[..., 0]
    loss = (theirs.amax(-1) - chosen).amax().item()
    unnamed = (all_ours.amax(-1) - ours.amax(-1)).amax().item()
    if not (difference <= allowed and max(loss, unnamed) <= allowed):  # nan must not pass
        raise ValueError(
            f"The output head applied to our features differs from the target's own logits by up "
            f"to {difference:.4g} (allowed {allowed:.4g} in {target.dtype}), and its argmax is up "
            f"to {max(loss, unnamed):.4g} worse. {_HINT}"
        )


_HINT = (
    "A head trained on such features would be useless. The family may do something to its logits "
    "or features that data/targets/families.py does not know, or it is quantised or wrapped."
)


def target_device(config: TargetConfig) -> torch.device:
    """The device that the target runs on; under a launcher, the GPU of this process."""
    if config.device != "auto":
        return torch.device(config.device)
    return process_state().device
