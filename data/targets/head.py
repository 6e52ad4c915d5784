"""The target's two matrices, from its model or its files: raw embedding rows and logits."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.config import TargetConfig
from data.targets.checkpoint_files import Checkpoint, open_checkpoint
from data.targets.families import (
    BIASES,
    EMBEDDINGS,
    OUTPUTS,
    load_config,
    logit_rule,
    target_dtype,
)

UNQUANTISED = (
    "Training needs the embedding and the output head as plain numbers. Quantise the target again "
    "and leave both out, as most published checkpoints do (ignore, modules_to_not_convert or "
    "llm_int8_skip_modules with lm_head; lm_head=false), and serve that copy."
)


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


def head_of(model: Any) -> TargetHead:
    """The head of a loaded model; it shares the model's memory.

    Raises ValueError if it is not a plain matrix.
    """
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    scale, cap = logit_rule(model.config)
    for name, module in (("input embedding", embedding), ("output head", output)):
        weight = getattr(module, "weight", None)
        if weight is None or not _is_plain(weight):
            raise ValueError(
                f"The target's {name} is a {type(module).__name__} with weights of "
                f"{'a packed form' if weight is None else weight.dtype}: it is quantised. "
                f"{UNQUANTISED}"
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


def read_target_head(config: TargetConfig) -> TargetHead:
    """The two matrices, straight from the checkpoint's files; the model is never built.

    Raises ValueError that lists the names tried if one is not there, or names the quantised tensor.
    """
    loaded = load_config(config)
    dtype = target_dtype(config, loaded)
    checkpoint = open_checkpoint(config)
    tied = bool(getattr(loaded, "tie_word_embeddings", False) or checkpoint.location.gguf_file)
    embedding, output = _find(checkpoint, EMBEDDINGS), _find(checkpoint, OUTPUTS)
    if tied:
        embedding, output = embedding or output, output or embedding
    if embedding is None or output is None:
        names = EMBEDDINGS if embedding is None else OUTPUTS
        raise ValueError(
            f"{config.path} has no tensor {', '.join(names)} (tie_word_embeddings is {tied}). It "
            f"has {len(checkpoint.files)} tensors, such as {', '.join(list(checkpoint.files)[:4])}."
        )
    embed_tokens = _read(checkpoint, embedding)
    weight = embed_tokens if output == embedding else _read(checkpoint, output)
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


def _find(checkpoint: Checkpoint, names: Iterable[str]) -> str | None:
    """Which of `names` is there. Raises ValueError if there are only parts of a packed form."""
    if (found := _first(checkpoint, names)) is not None:
        return found
    stems = tuple(name.removesuffix("weight") for name in names)
    parts = sorted(n for n in checkpoint.files if n.startswith(stems) and not n.endswith("bias"))
    if parts:
        raise ValueError(
            f"{checkpoint.location.path} has no {parts[0].rpartition('.')[0]}.weight, but "
            f"{', '.join(parts[:4])}: it is quantised. {UNQUANTISED}"
        )
    return None


def _read(checkpoint: Checkpoint, name: str) -> Tensor:
    matrix = checkpoint.read(name)
    if not _is_plain(matrix):
        raise ValueError(
            f"{name} of {checkpoint.location.path} is stored as {matrix.dtype}: it is quantised. "
            f"{UNQUANTISED}"
        )
    return matrix


def _is_plain(matrix: Tensor) -> bool:
    return matrix.is_floating_point() and matrix.dtype.itemsize > 1  # 8-bit floats need a scale


def _first(checkpoint: Checkpoint, names: Iterable[str]) -> str | None:
    return next((name for name in names if name in checkpoint), None)
