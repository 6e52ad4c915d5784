"""Heads that exist already, as the start of a run: our own, and published ones.

A published head is a folder with config.json and weights (safetensors or .bin, one file or
sharded): fc.weight, perhaps fc.bias, layers.0.*, perhaps embed_tokens.weight, each perhaps after
`model.`.
"""

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from data.config import TargetConfig
from data.targets.model import fingerprint, fingerprint_differences, read_target_head
from train.fit.checkpoints import RECORD, find_checkpoint, load_head
from train.head import DraftHead
from train.serve.folder import HeadFolder, head_folder, read_folder
from train.serve.shapes import config_sizes, normal_name, rope_config

log = logging.getLogger(__name__)
FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "hidden_act",
)
EMBEDDING_ROWS = 8192  # compared at once


def read_head(
    path: str,
    expected: LlamaConfig,
    *,
    embed_tokens: Tensor,
    known: dict[str, str],
    drop_bias: bool = False,
) -> dict[str, Tensor]:
    """The tensors of the head at `path`, under our names, in float32.

    path:         a run, one of its checkpoints, an export, or a published head's folder or hub id
    expected:     the config of the head that is to start from it
    embed_tokens: [V, H]  of the target; a copy in the file should equal it
    known:        fingerprint of the target; another one in our own heads is a warning

    Raises FileNotFoundError if there is no head, ValueError that lists all that does not fit.
    """
    stored = read_stored(path)
    tensors, config = dict(stored.tensors), stored.config
    problems = _config_problems(config, expected)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in DraftHead(expected).state_dict().items()}
    bias, embedding = tensors.pop("fc.bias", None), tensors.pop("embed_tokens.weight", None)
    if bias is not None and bias.any() and not drop_bias:
        problems.append(
            f"fc.bias is not zero (its norm is {float(bias.float().norm()):.3g}). Heads here have "
            "none, because vLLM drops it, and no other weight can take its place exactly. "
            "init_drop_bias=true starts without it; training then makes up for it"
        )
    if embedding is not None and embedding.shape != embed_tokens.shape:
        found, wanted = list(embedding.shape), list(embed_tokens.shape)
        problems.append(f"embed_tokens.weight is {found}, the target's is {wanted}")
    problems += _tensor_problems(tensors, shapes)
    if problems:
        raise ValueError(
            f"init_from={path} is not a head that this run can start from:\n  "
            + "\n  ".join(problems)
        )
    if embedding is not None:
        _warn_of_other_embeddings(f"init_from={path}", embedding, embed_tokens)
    for line in fingerprint_differences(known, stored.record.get("fingerprint", known)):
        log.warning("warning: init_from=%s was trained for another target: %s", path, line)
    without = " without its fc.bias" if bias is not None and bias.any() else ""
    log.info("start: init_from=%s, %s%s", path, stored.kind, without)
    return {name: tensor.float() for name, tensor in tensors.items()}


@dataclass(frozen=True, kw_only=True)
class StoredHead:
    """A head as it is stored somewhere, under our names."""

    tensors: dict[str, Tensor]
    config: LlamaConfig
    record: dict[str, Any]  # what its maker noted; {} for a published head
    kind: str  # for people


def read_stored(place: str) -> StoredHead:
    """A run's best checkpoint, one checkpoint, an export, or a published head (folder or hub id).

    Raises FileNotFoundError if there is no head, ValueError for files that cannot be read.
    """
    folder = Path(place).expanduser()
    if (folder / RECORD).is_file() or (folder / "steps").is_dir():
        checkpoint = find_checkpoint(folder)
        head, record = load_head(checkpoint)
        kind = f"the checkpoint of step {record['step']}"
        return StoredHead(tensors=head.state_dict(), config=head.config, record=record, kind=kind)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{place} holds no head. Expected a run (with steps/), a checkpoint of one, "
            "or an exported or published head (config.json and its weights)."
        )
    return stored_in(read_folder(head_folder(place)))


def stored_in(read: HeadFolder) -> StoredHead:
    """The head in a folder that has been read."""
    tensors = {normal_name(name, read.tensors): tensor for name, tensor in read.tensors.items()}
    # RoPE frequencies, which old files hold, follow from the config.
    tensors = {k: v for k, v in tensors.items() if not k.endswith("rotary_emb.inv_freq")}
    kind = "a published head"
    if read.record:
        kind = f"exported for {read.record['engine']} from step {read.record['step']}"
    return StoredHead(
        tensors=tensors, config=config_of(read.keys), record=read.record or {}, kind=kind
    )


def config_of(keys: dict[str, Any]) -> LlamaConfig:
    """The head's config as a config.json in either generation of Transformers means it."""
    sizes = config_sizes(keys)
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=keys.get("vocab_size", 32000),
        hidden_size=sizes.hidden,
        intermediate_size=sizes.width,
        num_hidden_layers=keys.get("num_hidden_layers", 32),
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        hidden_act=keys.get("hidden_act", "silu"),
        rms_norm_eps=keys.get("rms_norm_eps", 1e-6),
        max_position_embeddings=keys.get("max_position_embeddings", 2048),
        rope_parameters=rope_config(keys, sizes).rope_parameters,
        tie_word_embeddings=False,
        bos_token_id=keys.get("bos_token_id"),
        eos_token_id=keys.get("eos_token_id"),
    )


def load_head_folder(path: str | Path, target: TargetConfig) -> tuple[DraftHead, dict[str, Any]]:
    """Any head that is to be measured or exported, in float32, and what is known of its origin.

    path:   a run, one of its checkpoints, an export (of ours), or a published head: a folder or a
            hub id, with or without fc.bias and embed_tokens
    target: the one that it is for

    A published head has no fingerprint: the record has the given target's, and `published`. Raises
    FileNotFoundError if there is no head, ValueError that lists all that does not fit.
    """
    stored = read_stored(str(path))
    tensors, config = dict(stored.tensors), stored.config
    matrices = read_target_head(target)
    problems = []
    embedding = tensors.pop("embed_tokens.weight", None)
    if embedding is not None and embedding.shape != matrices.embed_tokens.shape:
        found, wanted = list(embedding.shape), list(matrices.embed_tokens.shape)
        problems.append(f"embed_tokens.weight is {found}, the target's is {wanted}")
    elif embedding is not None:
        _warn_of_other_embeddings(f"{path}", embedding, matrices.embed_tokens)
    bias = tensors.get("fc.bias")
    if bias is not None and not bias.any():
        del tensors["fc.bias"]
    config.fc_bias = "fc.bias" in tensors
    wanted_sizes = (matrices.weight.shape[1], matrices.weight.shape[0])
    if (config.hidden_size, config.vocab_size) != wanted_sizes:
        problems.append(
            f"hidden_size {config.hidden_size} and vocab_size {config.vocab_size}, the target "
            f"has {wanted_sizes[0]} and {wanted_sizes[1]}"
        )
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in DraftHead(config).state_dict().items()}
    if config.num_hidden_layers != 1:
        problems.append(f"config.json has num_hidden_layers {config.num_hidden_layers}, expected 1")
    problems += _tensor_problems(tensors, shapes)
    if problems:
        raise ValueError(
            f"{path} is not a head for {target.path} that can be run:\n  "
            + "\n  ".join(problems)
            + f"\nWhat engines would make of it: python -m scripts.check_export path={path} "
            f"target={target.path}"
        )
    head = DraftHead(config)
    head.load_state_dict(tensors)  # converts to the module's float32
    known = stored.record or {"published": True, "fingerprint": fingerprint(target)}
    record = {"engine": "eagle", "step": None, "acceptance": None, "source": str(path), **known}
    return head.eval(), record


def _config_problems(config: LlamaConfig, expected: LlamaConfig) -> list[str]:
    """One line for each field that makes another network of the same tensors."""
    problems = []
    for field in FIELDS:
        theirs, ours = getattr(config, field), getattr(expected, field)
        if theirs != ours:
            how = f"; head.intermediate_size={theirs} fits" if field == "intermediate_size" else ""
            problems.append(f"config.json has {field} {theirs}, this target's head has {ours}{how}")
    theirs, ours = config.rms_norm_eps, expected.rms_norm_eps
    if not math.isclose(theirs, ours, rel_tol=1e-6):  # GGUF files hold it in float32
        problems.append(f"config.json has rms_norm_eps {theirs}, this target's head has {ours}")
    # Scaling that changes no angle, or defaults written out, are no difference.
    if config.head_dim == expected.head_dim and not _same_rope(config, expected):
        problems.append(
            f"config.json has RoPE settings {config.rope_parameters}, this target's head has "
            f"{expected.rope_parameters}"
        )
    return problems


def _same_rope(one: LlamaConfig, other: LlamaConfig) -> bool:
    a, b = LlamaRotaryEmbedding(one), LlamaRotaryEmbedding(other)
    same_scale = a.attention_scaling == b.attention_scaling
    return same_scale and torch.allclose(a.inv_freq, b.inv_freq, rtol=1e-6, atol=0)


def _tensor_problems(tensors: dict[str, Tensor], shapes: dict[str, torch.Size]) -> list[str]:
    if any(name.startswith("midlayer.") or name in ("d2t", "t2d") for name in tensors):
        return ["it is an EAGLE-3 head, which is another network; this project trains EAGLE-1/2"]
    problems = [f"{name} is missing" for name in sorted(shapes.keys() - tensors.keys())]
    problems += [
        f"{name} does not belong: {_why(name)}" for name in sorted(tensors.keys() - shapes.keys())
    ]
    for name in sorted(tensors.keys() & shapes.keys()):
        if tensors[name].shape != shapes[name]:
            found, wanted = list(tensors[name].shape), list(shapes[name])
            problems.append(f"{name} is {found}, this target's head has {wanted}")
        elif not tensors[name].isfinite().all():
            problems.append(f"{name} holds values that are not finite")
    return problems


def _why(name: str) -> str:
    if "norm" in name:
        return "with another norm it is another network, which no engine builds for `eagle`"
    if name.endswith(".bias"):
        return "the layer has no biases"
    return "fc and one layer are all that a head has"


def _warn_of_other_embeddings(path: str, theirs: Tensor, ours: Tensor) -> None:
    """The head reads the target's embeddings here, as in SGLang; vLLM takes the file's own."""
    rows = 0
    for a, b in zip(theirs.split(EMBEDDING_ROWS), ours.cpu().split(EMBEDDING_ROWS), strict=True):
        close = torch.isclose(a.float(), b.float(), rtol=0.01, atol=1e-3)  # float16 and bfloat16
        rows += int((~close).any(dim=-1).sum())
    if rows:
        log.warning(
            "warning: %s has embeddings of its own: %d of %d rows differ from the "
            "target's, which are used. It was trained for another target.",
            path,
            rows,
            len(ours),
        )
