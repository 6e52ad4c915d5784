"""Checkpoints: folders that appear by rename, with `checkpoint.json` written last.

RUN/steps/000120/
    head.safetensors      the head's tensors under the names that engines load
    config.json           its LlamaConfig
    moments.safetensors   AdamW's, as exp_avg.NAME and exp_avg_sq.NAME
    checkpoint.json       step, acceptance, fingerprint of the target, settings
RUN/best.json             {"step": ..., "acceptance_length": ...}
"""

import re
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from data.cache import FeatureCache
from data.files import atomic_folder, read_json, sha256, write_json
from train.acceptance import HeldoutEstimate
from train.config import TrainConfig
from train.head import DraftHead
from train.sharding import set_master_weights, set_moments, whole_moments, whole_weights

FORMAT_VERSION = 1
RECORD = "checkpoint.json"
WEIGHTS, MOMENTS = "head.safetensors", "moments.safetensors"
COMMAND = "python -m scripts.train_head"
# Settings that may differ when a run goes on: they change no update, at most its rounding.
FREE_SETTINGS = {"features", "out", "micro_batch_tokens", "save_every", "keep", "log_every"}
FREE_SETTINGS |= {"tracker", "loss.chunk_rows", "target.path", "target.device"}
FREE_SETTINGS |= {"target.revision", "target.trust_remote_code"}


def make_record(
    step: int, config: TrainConfig, cache: FeatureCache, estimate: HeldoutEstimate | None
) -> dict:
    """What checkpoint.json says of a checkpoint."""
    return {
        "step": step,
        "acceptance": estimate and estimate.to_json(),
        "fingerprint": cache.fingerprint,
        "cache": _identity(cache),
        "replies": cache.manifest.get("replies"),
        "settings": asdict(config),
    }


def note_best(run: Path, step: int, estimate: HeldoutEstimate) -> None:
    """Update RUN/best.json when `estimate` is the best so far."""
    best = best_record(run)
    if best is None or estimate.length > best["acceptance_length"]:
        write_json(run / "best.json", {"step": step, **estimate.to_json()})


def find_resumable(run: Path, config: TrainConfig, cache: FeatureCache) -> Path | None:
    """The checkpoint that a run into this folder goes on from, or None for a fresh start.

    Raises ValueError naming every setting that differs, or the cache if it is another one.
    """
    found = checkpoints(run)
    if not found:
        return None
    record = load_record(found[-1])
    then, now = _flat(record["settings"]), _flat(asdict(config))
    differing = [
        f"  {name}: {then.get(name)} there, {now.get(name)} here"
        for name in sorted(then.keys() | now.keys())
        if name not in FREE_SETTINGS and then.get(name) != now.get(name)
    ]
    if record["cache"] != _identity(cache):
        differing.append(f"  features: {record['cache']} there, {_identity(cache)} here")
    if differing:
        raise ValueError(
            f"{run} holds a run with other settings (step {record['step']}):\n"
            + "\n".join(differing)
            + "\nGo on with the same settings, or train into another folder (out=...)."
        )
    return found[-1]


def save_checkpoint(
    run: Path,
    record: dict,
    *,
    accelerator: Accelerator,
    head: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    keep: int,
) -> None:
    """Write RUN/steps/STEP. Collective: every process calls it.

    record: what checkpoint.json will hold, with "step"; RUN/best.json decides what is kept
    """
    weights = whole_weights(accelerator, head)
    moments = whole_moments(accelerator, head, optimizer)
    if accelerator.is_main_process:
        with atomic_folder(run / "steps" / f"{record['step']:06d}") as tmp:
            save_file({n: t.cpu().contiguous() for n, t in weights.items()}, tmp / WEIGHTS)
            save_file(moments, tmp / MOMENTS)
            accelerator.unwrap_model(head).config.save_pretrained(tmp)
            write_json(tmp / RECORD, {"format_version": FORMAT_VERSION, **record})
        _forget_old(run, keep=keep)
    accelerator.wait_for_everyone()


def load_weights(checkpoint: Path, head: DraftHead) -> None:
    """Load a checkpoint's weights into a head that no launcher has wrapped yet."""
    head.load_state_dict(load_file(checkpoint / WEIGHTS))


def restore(
    checkpoint: Path,
    *,
    accelerator: Accelerator,
    head: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Load the optimizer's state, after `load_weights` and the wrapping of both. Collective."""
    moments, step = load_file(checkpoint / MOMENTS), load_record(checkpoint)["step"]
    set_moments(accelerator, head, optimizer, moments, step=step)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        set_master_weights(accelerator, head, load_file(checkpoint / WEIGHTS))


def checkpoints(run: Path) -> list[Path]:
    """Finished checkpoints of a run, oldest first."""
    folders = (run / "steps").glob("*") if (run / "steps").is_dir() else ()
    finished = [f for f in folders if re.fullmatch(r"\d+", f.name) and (f / RECORD).is_file()]
    return sorted(finished, key=lambda f: int(f.name))


def find_checkpoint(path: Path) -> Path:
    """A run's best checkpoint (else its newest), or the checkpoint itself.

    Raises FileNotFoundError that says what lies there instead.
    """
    if (path / RECORD).is_file():
        return path
    found = checkpoints(path)
    if not found:
        kind = "holds no finished checkpoint" if path.is_dir() else "does not exist"
        raise FileNotFoundError(
            f"{path} {kind}. Expected a run folder (with steps/000100/{RECORD}) or one checkpoint "
            f"of it. Train one with `{COMMAND} features=... out={path}`."
        )
    best = best_record(path)
    for folder in found:
        if best and int(folder.name) == best["step"]:
            return folder
    return found[-1]


def load_record(checkpoint: Path) -> dict:
    """checkpoint.json. Raises ValueError for another format version."""
    record = read_json(checkpoint / RECORD, made_by=COMMAND)
    if record.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{checkpoint / RECORD} has format_version {record.get('format_version')}, this "
            f"version reads {FORMAT_VERSION}."
        )
    return record


def load_head(checkpoint: Path) -> tuple[DraftHead, dict]:
    """The trained head in float32, and its record."""
    record = load_record(checkpoint)
    head = DraftHead(LlamaConfig.from_pretrained(checkpoint))
    head.load_state_dict(load_file(checkpoint / WEIGHTS))
    return head.eval(), record


def best_record(run: Path) -> dict | None:
    """RUN/best.json, or None before the first estimate."""
    path = run / "best.json"
    return read_json(path, made_by=COMMAND) if path.is_file() else None


def _identity(cache: FeatureCache) -> dict:
    return {
        "tokens": cache.manifest["num_tokens"],
        "dtype": cache.manifest["feature_dtype"],
        "sha256": sha256(cache.path / "manifest.json"),
    }


def _flat(settings: dict, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat


def _forget_old(run: Path, *, keep: int) -> None:
    best = best_record(run)
    for folder in checkpoints(run)[:-keep]:
        if not best or int(folder.name) != best["step"]:
            # Without its record it is no checkpoint, even if the removal is interrupted.
            (folder / RECORD).unlink()
            shutil.rmtree(folder)
