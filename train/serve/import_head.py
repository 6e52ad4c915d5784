"""Heads that exist already, as the start of a run: our own, and published ones.

A published head is a folder with config.json and weights (safetensors or .bin, one file or
sharded): fc.weight, perhaps fc.bias, layers.0.*, perhaps embed_tokens.weight, each perhaps after
`model.`.
"""

import logging
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from data.checkpoint_files import explained, locate, open_checkpoint
from data.config import TargetConfig
from data.files import read_json
from data.fingerprint import fingerprint_differences
from train.checkpoints import RECORD, find_checkpoint, load_head
from train.head import DraftHead

log = logging.getLogger(__name__)
EXPORTED = "eagle_head.json"
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
    fingerprint: dict[str, str],
    drop_bias: bool = False,
) -> dict[str, Tensor]:
    """The tensors of the head at `path`, under our names, in float32.

    path:         a run, one of its checkpoints, an export, or a published head's folder or hub id
    expected:     the config of the head that is to start from it
    embed_tokens: [V, H]  of the target; a copy in the file should equal it
    fingerprint:  of the target; another one in our own heads is a warning

    Raises FileNotFoundError if there is no head, ValueError that lists all that does not fit.
    """
    tensors, config, origin = _read(path)
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
        _warn_of_other_embeddings(path, embedding, embed_tokens)
    for line in fingerprint_differences(fingerprint, origin.get("fingerprint", fingerprint)):
        log.warning("warning: init_from=%s was trained for another target: %s", path, line)
    without = " without its fc.bias" if bias is not None and bias.any() else ""
    log.info("start: init_from=%s, %s%s", path, origin["kind"], without)
    return {name: tensor.float() for name, tensor in tensors.items()}


def _read(path: str) -> tuple[dict[str, Tensor], LlamaConfig, dict[str, Any]]:
    """Tensors without a `model.` prefix, the config, and what is known of the origin."""
    folder = Path(path).expanduser()
    if (folder / RECORD).is_file() or (folder / "steps").is_dir():
        checkpoint = find_checkpoint(folder)
        head, record = load_head(checkpoint)
        kind = f"the checkpoint of step {record['step']}"
        return head.state_dict(), head.config, record | {"kind": kind}
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"init_from={path} holds no head. Expected a run (with steps/), a checkpoint of one, "
            "or an exported or published head (config.json and its weights)."
        )
    place = TargetConfig(path=path)
    location = locate(place)
    with explained(location, "config"):
        keys, _ = PretrainedConfig.get_config_dict(location.path)
    try:
        stored = open_checkpoint(place)
        found = {name: stored.read(name) for name in stored.files}
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"init_from={path} has weights that are more than tensors; loading them would run code "
            f"({error}). Convert them to safetensors where they are trusted."
        ) from error
    tensors = {name.removeprefix("model."): tensor for name, tensor in found.items()}
    # RoPE frequencies, which old files hold, follow from the config.
    tensors = {k: v for k, v in tensors.items() if not k.endswith("rotary_emb.inv_freq")}
    origin = {"kind": "a published head"}
    if (folder / EXPORTED).is_file():
        record = read_json(folder / EXPORTED, made_by="python -m scripts.export_head")
        origin = record | {"kind": f"exported for {record['engine']} from step {record['step']}"}
    return tensors, LlamaConfig.from_dict(keys), origin


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
            "warning: init_from=%s has embeddings of its own: %d of %d rows differ from the "
            "target's, which are used. It was trained for another target.",
            path,
            rows,
            len(ours),
        )
