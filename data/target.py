"""The only module that reaches into a target: its features, output head and fingerprint."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from data.checkpoint_files import Checkpoint, explained, locate, open_checkpoint
from data.config import TargetConfig
from data.families import (
    BIASES,
    EMBEDDINGS,
    OUTPUTS,
    load_config,
    load_tokenizer,
    logit_rule,
    target_dtype,
)
from data.fingerprint import fingerprint, fingerprint_differences
from data.memory import keep_freed_pages
from data.processes import process_state

__all__ = [
    "Target",
    "TargetHead",
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

# Largest difference from the target's own logits, as a share of the largest logit: our scale and
# cap are applied in float32, the target's in its own dtype.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class TargetHead(nn.Module):
    """The target's frozen output head and its raw embedding rows; nothing in it is trainable.

    Engines feed a draft head raw rows: the multipliers of Gemma and Granite are not applied.
    """

    embed_tokens: Tensor  # [V, H]
    untied_weight: Tensor | None  # [V, H]
    bias: Tensor | None  # [V]

    def __init__(
        self,
        embed_tokens: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        logit_scale: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("embed_tokens", embed_tokens, persistent=False)
        # A tied matrix is one buffer, so that `.to(device)` cannot make two of it.
        self.register_buffer(
            "untied_weight", None if weight is embed_tokens else weight, persistent=False
        )
        self.register_buffer("bias", bias, persistent=False)
        self.logit_scale = logit_scale
        self.soft_cap = soft_cap

    @property
    def weight(self) -> Tensor:
        """The output matrix, [V, H]: `embed_tokens` itself if the target ties them."""
        return self.embed_tokens if self.untied_weight is None else self.untied_weight

    def embed(self, input_ids: Tensor) -> Tensor:
        """Raw embedding rows: [...] -> [..., H]."""
        return F.embedding(input_ids, self.embed_tokens)

    def logits(self, features: Tensor, *, out: Tensor | None = None) -> Tensor:
        """The target's logits, `cap * tanh(scale * (f W^T + b) / cap)`.

        features: [..., H]
        out:      [N, V] float32, filled and returned if given (then features are [N, H])
        returns   [..., V] float32 (float64 for such weights); product in the weight's dtype
        """
        features = features.to(self.weight.dtype)
        if out is None:
            logits = F.linear(features, self.weight, self.bias)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        elif out.dtype == features.dtype and self.bias is None:
            logits = torch.mm(features, self.weight.T, out=out)
        else:
            logits = out.copy_(F.linear(features, self.weight, self.bias))
        if self.logit_scale != 1.0:
            logits = torch.mul(logits, self.logit_scale, out=out)
        if self.soft_cap is not None:
            logits = torch.tanh(torch.div(logits, self.soft_cap, out=out), out=out)
            logits = torch.mul(logits, self.soft_cap, out=out)
        return logits

    def restricted(self, token_ids: Tensor) -> "TargetHead":
        """The same output head over a few tokens: its logits are [..., N], in their order.

        token_ids: [N]
        """
        return TargetHead(
            self.embed_tokens,
            self.weight[token_ids],
            bias=None if self.bias is None else self.bias[token_ids],
            logit_scale=self.logit_scale,
            soft_cap=self.soft_cap,
        )


@dataclass
class Target:
    """A frozen target, ready to run."""

    model: Any  # a Transformers causal language model
    tokenizer: Any
    head: TargetHead
    device: torch.device
    dtype: torch.dtype
    fingerprint: dict[str, str]

    @torch.no_grad()
    def features(self, input_ids: Tensor) -> Tensor:
        """What the output head reads, after the final norm: [B, T] -> [B, T, H].

        Only the backbone runs. Attention is causal, so padding on the right needs no mask.
        """
        backbone = self.model.get_decoder()
        return backbone(input_ids=input_ids, use_cache=False).last_hidden_state


def load_target(config: TargetConfig) -> Target:
    """Load the whole target. Raises ValueError if the files lack some of its weights."""
    location = locate(config)
    loaded = load_config(config)
    dtype, device = target_dtype(config, loaded), target_device(config)
    keep_freed_pages(device)
    arguments: dict[str, Any] = dict(location.arguments)
    if getattr(loaded.get_text_config(), "attn_logit_softcapping", None) is not None:
        # Gemma 2: the fused attention of PyTorch leaves the cap of its attention logits out.
        arguments["attn_implementation"] = "eager"
    with explained(location, "weights"):
        loading: Any = AutoModelForCausalLM.from_pretrained(
            location.path,
            dtype=dtype,
            device_map={"": device},
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
    model.requires_grad_(False).eval()
    return Target(
        model=model,
        tokenizer=load_tokenizer(config),
        head=_head_of(model),
        device=device,
        dtype=dtype,
        fingerprint=fingerprint(config),
    )


def read_target_head(config: TargetConfig) -> TargetHead:
    """The two matrices, straight from the checkpoint's files; the model is never built.

    Raises ValueError that lists the names tried if one is not there.
    """
    loaded = load_config(config)
    dtype = target_dtype(config, loaded)
    checkpoint = open_checkpoint(config)
    tied = bool(getattr(loaded, "tie_word_embeddings", False) or checkpoint.location.gguf_file)
    embedding = _first(checkpoint, EMBEDDINGS) or (_first(checkpoint, OUTPUTS) if tied else None)
    output = _first(checkpoint, OUTPUTS) or (embedding if tied else None)
    if embedding is None or output is None:
        names = EMBEDDINGS if embedding is None else OUTPUTS
        raise ValueError(
            f"{config.path} has no tensor {', '.join(names)} (tie_word_embeddings is {tied}). It "
            f"has {len(checkpoint.files)} tensors, such as {', '.join(list(checkpoint.files)[:4])}."
        )
    embed_tokens = checkpoint.read(embedding)
    weight = embed_tokens if output == embedding else checkpoint.read(output)
    if tied and torch.equal(weight, embed_tokens):  # as Transformers decides it
        weight = embed_tokens
    tied_weight = weight is embed_tokens
    embed_tokens = embed_tokens.to(dtype)
    bias = _first(checkpoint, BIASES)
    scale, cap = logit_rule(loaded)
    return TargetHead(
        embed_tokens,
        embed_tokens if tied_weight else weight.to(dtype),
        bias=None if bias is None else checkpoint.read(bias).to(dtype),
        logit_scale=scale,
        soft_cap=cap,
    )


@torch.no_grad()
def check_output_head(target: Target, input_ids: Tensor) -> None:
    """Check that head and features give the target's own logits.

    input_ids: [B, T]  right-padded; at most 2 x 256 of them are used

    Raises ValueError with an explanation otherwise: a wrong layer, a missing final norm, a
    multiplier, a wrapped or a quantised model all show here.
    """
    input_ids = input_ids[:2, :256].to(target.device)
    theirs = target.model(input_ids=input_ids, use_cache=False).logits.float()  # [B, T, V]
    ours = target.head.logits(target.features(input_ids))
    if ours.shape != theirs.shape:
        raise ValueError(
            f"The output head gives logits of shape {tuple(ours.shape)}, the target itself "
            f"{tuple(theirs.shape)}. {_HINT}"
        )
    allowed = TOLERANCE[target.dtype] * theirs.abs().amax().item()
    difference = (ours - theirs).abs().amax().item()
    # Where the argmax differs, the two candidates must be as good as equal in the target's eyes.
    chosen = theirs.gather(-1, ours.argmax(-1, keepdim=True))[..., 0]
    loss = (theirs.amax(-1) - chosen).amax().item()
    if not (difference <= allowed and loss <= allowed):  # nan must not pass
        raise ValueError(
            f"The output head applied to our features differs from the target's own logits by up "
            f"to {difference:.4g} (allowed {allowed:.4g} in {target.dtype}), and its argmax is up "
            f"to {loss:.4g} worse. {_HINT}"
        )


_HINT = (
    "A head trained on such features would be useless. The family may apply something to its "
    "logits or features that data/target.py does not know, or the weights are quantised or wrapped."
)


def _head_of(model: Any) -> TargetHead:
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    scale, cap = logit_rule(model.config)
    if not isinstance(output, nn.Linear) or not output.weight.is_floating_point():
        raise ValueError(
            f"The target's output head is a {type(output).__name__} with "
            f"{getattr(output.weight, 'dtype', 'no')} weights; expected an unquantised nn.Linear."
        )
    tied = output.weight is embedding.weight
    embed_tokens = embedding.weight.detach()
    return TargetHead(
        embed_tokens,
        embed_tokens if tied else output.weight.detach(),
        bias=None if output.bias is None else output.bias.detach(),
        logit_scale=scale,
        soft_cap=cap,
    )


def _first(checkpoint: Checkpoint, names: Iterable[str]) -> str | None:
    return next((name for name in names if name in checkpoint), None)


def target_device(config: TargetConfig) -> torch.device:
    """The device that the target runs on; under a launcher, the GPU of this process."""
    if config.device != "auto":
        return torch.device(config.device)
    return process_state().device
