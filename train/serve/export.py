"""From a checkpoint to the folder that a serving engine loads, and back."""

import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from data.config import TargetConfig, or_known
from data.files import atomic_folder, read_json, write_json
from data.target import (
    TargetHead,
    fingerprint,
    fingerprint_differences,
    load_config,
    read_target_head,
)
from train.checkpoints import find_checkpoint, load_head
from train.config import ExportConfig
from train.head import SERVED_INPUTS, DraftHead
from train.serve.engine_config import (
    ENGINE_NAMES,
    UNSERVED,
    dtype_name,
    engine_config,
    engine_tensors,
    tensor_problems,
)
from train.serve.model_card import model_card, serve_command

__all__ = ["export", "load_exported", "serve_command"]

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
RECORD = "eagle_head.json"
WEIGHTS = "model.safetensors"
COMMAND = "python -m scripts.export_head"
FILES = {"config.json", WEIGHTS, RECORD, "README.md"}
REPORTS = {"evaluation", "check"}  # measured on this head; they go when it is replaced


def export(config: ExportConfig) -> Path:
    """Write the folder that `config.engine` serves, read it again and compare. Returns it.

    Raises ValueError if the target is not the one that the head was trained for, if the folder
    holds files that no export wrote, or if what was read back is not what was trained.
    """
    checkpoint = find_checkpoint(Path(config.checkpoint))
    head, record = load_head(checkpoint)
    if head.inputs != SERVED_INPUTS:
        raise ValueError(
            f"{checkpoint} was trained with head.inputs={head.inputs}, for comparison: engines "
            f"feed a head both token and feature. Export one with head.inputs={SERVED_INPUTS}."
        )
    target, target_config, target_head = _read_target(config, record, checkpoint)
    dtype = target_head.weight.dtype
    out = Path(config.out) if config.out else _run_folder(checkpoint) / "export" / config.engine
    _check_folder_is_ours(out)
    log.info("checkpoint  %s, step %s", checkpoint, record["step"])
    log.info("target      %s, %s in %s", target.path, target_config.model_type, dtype_name(dtype))
    if target_config.model_type != "llama":
        log.info(
            "head        one Llama layer, by design: that is what engines build for any target"
        )
    tried, unserved = UNSERVED[config.engine]
    if target_config.model_type in unserved:
        log.warning(
            "warning     %s %s has no drafting for %s targets; see whether your version has",
            ENGINE_NAMES[config.engine],
            tried,
            target_config.model_type,
        )

    origin = {
        "format_version": FORMAT_VERSION,
        "method": "eagle",
        "engine": config.engine,
        "dtype": dtype_name(dtype),
        "step": record["step"],
        "acceptance": record.get("acceptance"),
        "fingerprint": record["fingerprint"],
        "cache": record.get("cache"),
        "replies": record.get("replies"),
        "settings": record.get("settings"),
        "versions": {name: version(name) for name in ("torch", "transformers", "safetensors")},
    }
    keys = engine_config(
        head.config,
        target_config,
        engine=config.engine,
        vocab_size=target_head.weight.shape[0],
        dtype=dtype,
    )
    with atomic_folder(out) as tmp:
        save_file(
            engine_tensors(head, engine=config.engine, dtype=dtype),
            tmp / WEIGHTS,
            metadata={"format": "pt"},
        )
        write_json(tmp / "config.json", keys)
        write_json(tmp / RECORD, origin)
        card = model_card(origin, out, target.path)
        (tmp / "README.md").write_text(card, encoding="utf-8")
        error = compare(head, tmp)
    log.info("read back   tensors equal bit for bit in %s, outputs within %.1e", dtype, error)
    log.info("exported    %s", out)
    log.info("serve with  %s", serve_command(out, target.path, config.engine))
    return out


def load_exported(path: Path) -> tuple[DraftHead, dict]:
    """The head in float32 and its origin record.

    Raises FileNotFoundError or ValueError that lists everything wrong with the folder.
    """
    record = read_json(path / RECORD, made_by=f"{COMMAND} checkpoint=... out={path}")
    if record.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path / RECORD} has format_version {record.get('format_version')}, this version "
            f"reads {FORMAT_VERSION}. Export the head again with `{COMMAND} checkpoint=...`."
        )
    tensors = _load_tensors(path)
    keys = read_json(path / "config.json", made_by=f"{COMMAND} checkpoint=... out={path}")
    head = DraftHead(LlamaConfig.from_dict(keys))
    shapes = {name: tensor.shape for name, tensor in head.state_dict().items()}
    if record["engine"] == "sglang":
        shapes["fc.bias"] = torch.Size([head.config.hidden_size])
    problems = tensor_problems(tensors, shapes, dtype=getattr(torch, record["dtype"]))
    problems += _config_problems(keys)
    if problems:
        raise ValueError(
            f"{path} is not a head that {record['engine']} serves as it was trained: "
            + "; ".join(problems)
            + f". Export it again with `{COMMAND} checkpoint=... engine={record['engine']}`."
        )
    tensors.pop("fc.bias", None)
    head.load_state_dict(tensors)  # converts to the module's float32
    return head.eval(), record


@torch.no_grad()
def compare(head: DraftHead, path: Path) -> float:
    """Read an exported folder and compare it with the trained head.

    Tensors must equal the trained ones, rounded once to the folder's dtype, bit for bit. Outputs
    on random features must be as close as that rounding allows; returns their relative distance.
    Raises RuntimeError that names what differs.
    """
    read, record = load_exported(path)
    dtype = getattr(torch, record["dtype"])
    read_state = read.state_dict()
    for name, trained in head.state_dict().items():
        if not torch.equal(read_state[name], trained.to(dtype).float()):
            raise RuntimeError(f"{name} in {path / WEIGHTS} is not the trained tensor.")
    if not torch.equal(read.rotary.inv_freq, head.rotary.inv_freq):
        raise RuntimeError(f"The RoPE settings in {path / 'config.json'} are not the trained ones.")
    inputs = _random_inputs(head.config)
    ours, theirs = head(*inputs), read(*inputs)
    error = float((ours - theirs).norm() / ours.norm())
    # Every weight is off by at most half a unit in its last place, independently.
    limit = 4 * torch.finfo(dtype).eps
    if not error <= limit:
        raise RuntimeError(
            f"The head read back from {path} computes other features than the trained one: "
            f"relative distance {error:.1e}, at most {limit:.1e} was expected of {dtype} weights."
        )
    return error


def _read_target(
    config: ExportConfig, record: dict, checkpoint: Path
) -> tuple[TargetConfig, PretrainedConfig, TargetHead]:
    known = record["fingerprint"]
    target = or_known(config.target, known)
    differences = fingerprint_differences(fingerprint(target), known)
    if differences:
        raise ValueError(
            f"{target.path} is not the target that {checkpoint} was trained for: "
            + "; ".join(differences)
            + ". Say where that target is (target=...)."
        )
    return target, load_config(target), read_target_head(target)


def _run_folder(checkpoint: Path) -> Path:
    return checkpoint.parent.parent if checkpoint.parent.name == "steps" else checkpoint


def _check_folder_is_ours(out: Path) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"{out} is a file. Choose a folder for the export (out=...).")
    foreign = sorted({entry.name for entry in out.iterdir()} - FILES - REPORTS)
    if foreign:
        # Engines load every weights file they find, and later files overwrite earlier ones.
        raise ValueError(
            f"{out} holds files that no export wrote: {', '.join(foreign[:5])}. Nothing was "
            f"changed. Choose another folder (out=...), or empty this one."
        )


def _load_tensors(path: Path) -> dict[str, Tensor]:
    files = sorted(f.name for f in path.iterdir() if f.suffix in (".safetensors", ".bin", ".pt"))
    if files != [WEIGHTS]:
        raise ValueError(
            f"{path} must hold exactly one weights file, {WEIGHTS}, but holds "
            f"{', '.join(files) or 'none'}. Engines load all they find."
        )
    return load_file(path / WEIGHTS)


def _config_problems(keys: dict[str, Any]) -> list[str]:
    expected = {
        "num_hidden_layers": 1,
        "bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    return [
        f"config.json has {key} {keys[key]!r}, expected {value!r}"
        for key, value in expected.items()
        if keys.get(key, value) != value
    ] + [
        f"config.json has no {key}"
        for key in ("num_hidden_layers", "vocab_size", "head_dim", "rope_theta", "torch_dtype")
        if key not in keys
    ]


def _random_inputs(config: LlamaConfig) -> tuple[Tensor, Tensor, list[int]]:
    # Long enough for RoPE to matter, in two documents of different lengths.
    generator = torch.Generator().manual_seed(0)
    lengths = [96, 32]
    shape = (sum(lengths), config.hidden_size)
    embeddings, features = (torch.randn(shape, generator=generator) for _ in range(2))
    return embeddings, features, lengths
