"""From a checkpoint to the folder that a serving engine loads, and back."""

import logging
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from data.config import TargetConfig, or_known
from data.files import atomic_folder, read_json, sha256, write_json
from data.targets.model import (
    fingerprint,
    fingerprint_differences,
    load_config,
    read_target_head,
)
from train.config import ExportConfig
from train.fit.checkpoints import find_checkpoint, load_head
from train.head import SERVED_INPUTS, DraftHead
from train.serve.engine_config import (
    ENGINE_NAMES,
    WEIGHTS,
    dtype_name,
    engine_config,
    engine_tensors,
    tensor_problems,
)
from train.serve.families import VERSIONS, unserved
from train.serve.folder import RECORD, read_folder
from train.serve.hub import push
from train.serve.import_head import config_of, load_head_folder
from train.serve.model_card import measured_tree, model_card, serve_command

__all__ = ["export", "load_exported", "serve_command"]

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
COMMAND = "python -m scripts.export_head"
FILES = {"config.json", *WEIGHTS.values(), RECORD, "README.md"}
REPORTS = {"evaluation", "check"}  # measured on this head; they go when it is replaced


def export(config: ExportConfig) -> Path:
    """Write the folder that `config.engine` serves, read it again and compare. Returns it.

    Raises ValueError if the target is not the one that the head was trained for, if the folder
    holds files that no export wrote, if the engine would drop a tensor, or if what was read back
    is not what was trained.
    """
    head, record, source, target = _read_source(config)
    target_config, target_head = load_config(target), read_target_head(target)
    dtype = target_head.weight.dtype
    out = Path(config.out) if config.out else _run_folder(source) / "export" / config.engine
    _check_folder_is_ours(out)
    step = f", step {record['step']}" if record.get("step") is not None else ""
    log.info("checkpoint  %s%s", source, step)
    log.info("target      %s, %s in %s", target.path, target_config.model_type, dtype_name(dtype))
    if target_config.model_type != "llama":
        log.info(
            "head        one Llama layer, by design: that is what engines build for any target"
        )
    _warn_of_unserved(config.engine, target_config)
    keys = engine_config(
        head.config,
        target_config,
        engine=config.engine,
        vocab_size=target_head.weight.shape[0],
        dtype=dtype,
    )
    tensors = engine_tensors(
        head, engine=config.engine, dtype=dtype, embed_tokens=target_head.embed_tokens
    )
    with atomic_folder(out) as tmp:
        weights = tmp / WEIGHTS[config.engine]
        _save(tensors, weights)
        write_json(tmp / "config.json", keys)
        origin = _origin(config.engine, record, head, dtype=dtype, weights=weights)
        write_json(tmp / RECORD, origin)
        _keep_reports(out, tmp, weights)
        card = model_card(origin, out, target.path, tree=measured_tree(tmp))
        (tmp / "README.md").write_text(card, encoding="utf-8")
        error = compare(head, tmp)
    log.info("read back   tensors equal bit for bit in %s, outputs within %.1e", dtype, error)
    log.info("exported    %s", out)
    command = serve_command(out, target.path, config.engine, tree=measured_tree(out))
    log.info("serve with  %s", command)
    if config.push_to_hub:
        push(out, config.push_to_hub, private=config.private)
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
    read, engine = read_folder(path), record["engine"]
    if read.files != [WEIGHTS[engine]]:
        raise ValueError(
            f"{path} must hold exactly one weights file, {WEIGHTS[engine]}, but holds "
            f"{', '.join(read.files) or 'none'}. Engines load all they find."
        )
    config = config_of(read.keys)
    config.fc_bias = record.get("fc_bias", False)
    head, tensors = DraftHead(config), dict(read.tensors)
    shapes = {name: tensor.shape for name, tensor in head.state_dict().items()}
    if engine == "sglang":
        shapes["fc.bias"] = torch.Size([config.hidden_size])
    if engine == "eagle":
        shapes["embed_tokens.weight"] = torch.Size([config.vocab_size, config.hidden_size])
    problems = tensor_problems(tensors, shapes, dtype=getattr(torch, record["dtype"]))
    problems += _config_problems(read.keys, engine, fc_bias=config.fc_bias)
    if not config.fc_bias and tensors.pop("fc.bias", torch.zeros(1)).any():
        problems.append("fc.bias is not zero, but the head is trained without one")
    if read.altered:
        problems.append(f"{WEIGHTS[engine]} is another file than was exported (its checksum)")
    if problems:
        raise ValueError(
            f"{path} is not a head that {engine} serves as it was trained: "
            + "; ".join(problems)
            + f". Export it again with `{COMMAND} checkpoint=... engine={engine}`."
        )
    tensors.pop("embed_tokens.weight", None)
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
            raise RuntimeError(f"{name} in {path} is not the trained tensor.")
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


def _read_source(config: ExportConfig) -> tuple[DraftHead, dict, Path, TargetConfig]:
    """The head, its record and place, and its target; checked that they belong together."""
    given = Path(config.checkpoint).expanduser()
    is_folder = (given / "config.json").is_file() and not (given / "checkpoint.json").is_file()
    if is_folder or not given.exists():
        if not config.target.path and not (given / RECORD).is_file():
            raise ValueError(
                f"{config.checkpoint} is no run of this project, so nothing says which target its "
                "head is for. Say where that is (target=...)."
            )
        record = read_json(given / RECORD, made_by=COMMAND) if (given / RECORD).is_file() else {}
        target = or_known(config.target, record.get("fingerprint") or {"path": "", "revision": ""})
        head, record = load_head_folder(config.checkpoint, target)
        source = given
    else:
        source = find_checkpoint(given)
        head, record = load_head(source)
        target = or_known(config.target, record["fingerprint"])
    if head.inputs != SERVED_INPUTS:
        raise ValueError(
            f"{source} was trained with head.inputs={head.inputs}, for comparison: engines "
            f"feed a head both token and feature. Export one with head.inputs={SERVED_INPUTS}."
        )
    differences = fingerprint_differences(fingerprint(target), record["fingerprint"])
    if differences:
        raise ValueError(
            f"{target.path} is not the target that {source} was trained for: "
            + "; ".join(differences)
            + ". Say where that target is (target=...)."
        )
    return head, record, source, target


def _origin(
    engine: str, record: dict, head: DraftHead, *, dtype: torch.dtype, weights: Path
) -> dict[str, Any]:
    """What eagle_head.json says."""
    published = {key: record[key] for key in ("published", "source") if record.get("published")}
    return {
        "format_version": FORMAT_VERSION,
        "method": "eagle",
        "engine": engine,
        "dtype": dtype_name(dtype),
        "fc_bias": head.fc.bias is not None,
        "weights_sha256": sha256(weights),
        "step": record.get("step"),
        "acceptance": record.get("acceptance"),
        "fingerprint": record["fingerprint"],
        "cache": record.get("cache"),
        "replies": record.get("replies"),
        "settings": record.get("settings"),
        "versions": {name: version(name) for name in ("torch", "transformers", "safetensors")},
        **published,
    }


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    if file.suffix == ".bin":
        torch.save(tensors, file)
    else:
        save_file(tensors, file, metadata={"format": "pt"})


def _keep_reports(out: Path, tmp: Path, weights: Path) -> None:
    """Reports that were measured on the very same weights stay beside them."""
    if not (out / weights.name).is_file() or sha256(out / weights.name) != sha256(weights):
        return
    for name in REPORTS:
        if (out / name).is_dir():
            shutil.copytree(out / name, tmp / name)


def _warn_of_unserved(engine: str, target_config: PretrainedConfig) -> None:
    family = target_config.get_text_config().model_type
    if (why := unserved(engine, family)) is not None:
        log.warning(
            "warning     %s %s has no drafting for %s targets (%s); see whether your version has",
            ENGINE_NAMES[engine],
            VERSIONS[engine],
            family,
            why,
        )


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


def _config_problems(keys: dict[str, Any], engine: str, *, fc_bias: bool) -> list[str]:
    expected = {
        "num_hidden_layers": 1,
        "bias": fc_bias if engine == "eagle" else False,
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
