"""The only module that reaches into a target: its features, output head and fingerprint."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from data.checkpoint_files import Checkpoint, explained, locate, open_checkpoint
from data.config import TargetConfig


def _plain(config: Any) -> tuple[float, float | None]:
    return 1.0, None


def _capped(config: Any) -> tuple[float, float | None]:
    return 1.0, config.final_logit_softcapping


# model_type of the text model -> (scale, soft cap) that turn `lm_head(f)` into its logits.
# A family belongs here once a test shows that features and head give the model's own logits.
FAMILIES: dict[str, Callable[[Any], tuple[float, float | None]]] = {
    "llama": _plain,
    "mistral": _plain,
    "mixtral": _plain,
    "qwen2": _plain,
    "qwen2_moe": _plain,
    "qwen3": _plain,
    "qwen3_moe": _plain,
    "phi3": _plain,
    "gemma2": _capped,
    "gemma3_text": _capped,
    "granite": lambda config: (1.0 / config.logits_scaling, None),
    "cohere": lambda config: (config.logit_scale, None),
}
WRAPPERS = ("gemma3",)  # image-text models whose text part works alone

EMBEDDINGS = (
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "token_embd.weight",  # GGUF
)
OUTPUTS = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "output.weight",  # GGUF
)
BIASES = ("lm_head.bias", "language_model.lm_head.bias", "output.bias")
# Largest difference from the target's own logits, as a share of the largest logit: our scale and
# cap are applied in float32, the target's in its own dtype.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class TargetHead(nn.Module):
    """The target's frozen output head and its raw embedding rows; nothing in it is trainable.

    Engines feed a draft head raw rows: the multipliers of Gemma and Granite are not applied.
    """

    embed_tokens: Tensor  # [V, H]
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
        returns   [..., V] float32; the product is made in the weight's dtype
        """
        features = features.to(self.weight.dtype)
        if out is None:
            logits = F.linear(features, self.weight, self.bias).float()
        elif out.dtype == features.dtype and self.bias is None:
            logits = torch.mm(features, self.weight.T, out=out)
        else:
            logits = out.copy_(F.linear(features, self.weight, self.bias))
        if self.logit_scale != 1.0:
            logits *= self.logit_scale
        if self.soft_cap is not None:
            logits = logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        return logits


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


def load_config(config: TargetConfig) -> PretrainedConfig:
    """The target's own config. Raises ValueError if its family is not among FAMILIES."""
    location = locate(config)
    with explained(location, "config"):
        loaded = AutoConfig.from_pretrained(
            location.path, trust_remote_code=config.trust_remote_code, **location.arguments
        )
    text = loaded.get_text_config()
    known = loaded.model_type in FAMILIES or loaded.model_type in WRAPPERS
    if not known or text.model_type not in FAMILIES:
        raise ValueError(
            f"{config.path} is a {loaded.model_type} model, whose output head has not been tested "
            f"here. Tested families: {', '.join(sorted(FAMILIES))}; text part of "
            f"{', '.join(WRAPPERS)}. To add one: a line in FAMILIES (data/target.py) and the test "
            "that its features and head give the model's own logits."
        )
    return loaded


def load_tokenizer(config: TargetConfig) -> Any:
    """The target's tokenizer."""
    location = locate(config)
    with explained(location, "tokenizer"):
        return AutoTokenizer.from_pretrained(
            location.path, trust_remote_code=config.trust_remote_code, **location.arguments
        )


def load_target(config: TargetConfig) -> Target:
    """Load the whole target. Raises ValueError if the files lack some of its weights."""
    location = locate(config)
    loaded = load_config(config)
    dtype, device = _dtype(config, loaded), _device(config)
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
    dtype = _dtype(config, loaded)
    checkpoint = open_checkpoint(config)
    tied = getattr(loaded, "tie_word_embeddings", False) or checkpoint.location.gguf_file
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
    scale, cap = _logit_rule(loaded)
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


def fingerprint(config: TargetConfig) -> dict[str, str]:
    """What identifies a target, read from its files without loading it."""
    loaded = load_config(config)
    tokenizer = load_tokenizer(config)
    checkpoint = open_checkpoint(config)
    quantization = getattr(loaded, "quantization_config", None) or {}
    if not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    method = "gguf" if checkpoint.location.gguf_file else quantization.get("quant_method", "none")
    return {
        "path": config.path,
        "revision": config.revision or "",
        "model_type": loaded.model_type,
        "config": _digest([_canonical(loaded)]),
        "weights": _digest(_weight_samples(checkpoint, loaded)),
        "tokenizer": _digest([_tokenizer_text(tokenizer)]),
        "chat_template": _digest([json.dumps(tokenizer.chat_template, sort_keys=True)]),
        "quantization": str(method),
    }


def fingerprint_differences(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """One readable line for each field that differs; the place of a target is none of them."""
    fields = [key for key in {**ours, **theirs} if key not in ("path", "revision")]
    return [
        f"{key}: {ours.get(key, 'absent')} here, {theirs.get(key, 'absent')} there"
        for key in fields
        if ours.get(key) != theirs.get(key)
    ]


def _weight_samples(checkpoint: Checkpoint, loaded: PretrainedConfig) -> Iterable[bytes | str]:
    """Names and first rows of both matrices, the final norm and the whole last layer.

    A fine-tuned or merged model differs there, and on the hub they lie in two or three files.
    """
    last = loaded.get_text_config().num_hidden_layers - 1
    wanted = (f"layers.{last}.", f"blk.{last}.")
    norms = ("model.norm.weight", "language_model.norm.weight", "output_norm.weight")
    for name in sorted(checkpoint.files):
        in_layer = any(part in name for part in wanted) and "vision" not in name
        if in_layer or name in EMBEDDINGS + OUTPUTS or name.endswith(norms):
            yield name
            yield checkpoint.sample(name)


def _canonical(loaded: PretrainedConfig) -> str:
    """The config without what may differ between two copies of one model."""
    volatile = {"_name_or_path", "transformers_version", "architectures", "dtype", "use_cache"}
    fields = {k: v for k, v in loaded.to_diff_dict().items() if k not in volatile}
    return json.dumps(fields, sort_keys=True, default=str)


def _tokenizer_text(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return backend.to_str()
    return json.dumps(tokenizer.get_vocab(), sort_keys=True)


def _digest(parts: Iterable[bytes | str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]


def _head_of(model: Any) -> TargetHead:
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    scale, cap = _logit_rule(model.config)
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


def _logit_rule(loaded: PretrainedConfig) -> tuple[float, float | None]:
    text = loaded.get_text_config()
    return FAMILIES[text.model_type](text)


def _first(checkpoint: Checkpoint, names: Iterable[str]) -> str | None:
    return next((name for name in names if name in checkpoint), None)


def _dtype(config: TargetConfig, loaded: PretrainedConfig) -> torch.dtype:
    name = config.dtype
    if name == "auto":
        own = loaded.dtype or loaded.get_text_config().dtype or torch.float32
        name = str(own).removeprefix("torch.")
    dtype = getattr(torch, name, None)
    if dtype not in TOLERANCE:
        known = ", ".join(str(d).removeprefix("torch.") for d in TOLERANCE)
        raise ValueError(f"target.dtype is {name}, expected auto, {known}.")
    return dtype


def _device(config: TargetConfig) -> torch.device:
    if config.device != "auto":
        return torch.device(config.device)
    from accelerate import PartialState

    return PartialState().device  # under a launcher, the GPU of this process
