"""Checkpoints: folders that appear by rename, with `checkpoint.json` written last.

RUN/steps/000120/
    head.safetensors      the head's tensors under the names that engines load
    config.json           its LlamaConfig
    moments.safetensors   AdamW's, as exp_avg.NAME and exp_avg_sq.NAME
    checkpoint.json       step, acceptance, fingerprint of the target, settings, the best so far
RUN/best.json             {"step": ..., "acceptance_length": ...}, once its checkpoint is there
"""

import logging
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from data.cache.reader import FeatureCache
from data.files import (
    atomic_folder,
    free_space,
    read_json,
    readable_size,
    sha256,
    write_json,
    writing,
)
from data.targets.fingerprint import fingerprint_differences
from train.acceptance import HeldoutEstimate
from train.config import TrainConfig, flat
from train.fit.sharding import set_master_weights, set_moments, whole_moments, whole_weights
from train.head import DraftHead

log = logging.getLogger(__name__)
FORMAT_VERSION = 1
RECORD = "checkpoint.json"
WEIGHTS, MOMENTS = "head.safetensors", "moments.safetensors"
COMMAND = "python -m scripts.train_head"
# Settings that may differ when a run goes on: they change no update, at most its rounding.
FREE_SETTINGS = {"features", "out", "micro_batch_tokens", "save_every", "keep", "log_every"}
FREE_SETTINGS |= {"tracker", "loss.chunk_rows", "target.path", "target.device"}
FREE_SETTINGS |= {"target.revision", "target.trust_remote_code", "patience"}


@dataclass
class Best:
    """The best held-out estimate of a run so far. Equal on all processes, and saved with each step.

    A tie goes to the earlier step.
    """

    record: dict | None = None  # what RUN/best.json holds
    since: int = 0  # estimates that came after it

    @property
    def length(self) -> float:
        """Its acceptance length; 1, the bonus token, where nothing was measured."""
        return self.record["acceptance_length"] if self.record else 1.0

    def add(self, step: int, estimate: HeldoutEstimate) -> None:
        """Note the estimate of a step, the last one so far."""
        if self.record is None or estimate.length > self.length:
            self.record, self.since = {"step": step, **estimate.to_json()}, 0
        else:
            self.since += 1

    @classmethod
    def of(cls, checkpoint: Path | None) -> "Best":
        """As it was when `checkpoint` was saved; None: before the first one."""
        return cls(**load_record(checkpoint)["best"]) if checkpoint else cls()


def make_record(
    step: int,
    config: TrainConfig,
    cache: FeatureCache,
    *,
    estimate: HeldoutEstimate | None,
    best: Best,
) -> dict:
    """What checkpoint.json says of a checkpoint."""
    return {
        "step": step,
        "acceptance": estimate and estimate.to_json(),
        "best": asdict(best),
        "fingerprint": cache.fingerprint,
        "cache": _identity(cache),
        "replies": cache.manifest.get("replies"),
        "settings": asdict(config),
    }


def tidy(run: Path, best: Best) -> None:
    """Leave nothing in the folder of what was done after the checkpoint that the run goes on from.

    A process may have died in the middle of a save, or after an estimate that will be done again.
    """
    finished = set(checkpoints(run))
    for path in (run / "steps").glob("*"):
        if path.is_dir() and path not in finished:
            shutil.rmtree(path)
    if best.record is None:
        (run / "best.json").unlink(missing_ok=True)
    elif best.record != best_record(run):
        write_json(run / "best.json", best.record)


def check_space(run: Path, head: DraftHead, *, keep: int) -> None:
    """Print what the checkpoints will take, and raise ValueError if the disk lacks that.

    Each holds the weights and AdamW's two moments in float32. A new one is whole before an old one
    goes, and the best one stays besides the newest.
    """
    size = 3 * sum(p.numel() * 4 for p in head.parameters())
    free, existing = free_space(run)
    log.info(
        "checkpoints: %d x %s at most in %s/steps, and one more while it is written; %s free",
        keep + 1,
        readable_size(size),
        run,
        readable_size(free),
    )
    there = sum(file.stat().st_size for file in (run / "steps").rglob("*") if file.is_file())
    missing = (keep + 2) * size - there
    if missing > free:
        raise ValueError(
            f"The checkpoints need {readable_size(missing)} more, but {existing} has "
            f"{readable_size(free)} free. Make room, keep fewer (keep={keep} now), or train into "
            "a folder on another disk (out=...)."
        )


def find_resumable(run: Path, config: TrainConfig, cache: FeatureCache) -> Path | None:
    """The checkpoint that a run into this folder goes on from, or None for a fresh start.

    Raises ValueError naming every setting that differs, or the cache if it is another one.
    """
    found = checkpoints(run)
    if not found:
        return None
    record = load_record(found[-1])
    then, now = flat(record["settings"]), flat(asdict(config))
    differing = [
        f"  {name}: {then.get(name)} there, {now.get(name)} here"
        for name in sorted(then.keys() | now.keys())
        if name not in FREE_SETTINGS and then.get(name) != now.get(name)
    ]
    target = fingerprint_differences(cache.fingerprint, record["fingerprint"])
    differing += [f"  target, {line}" for line in target]
    if record["cache"] != (now_cache := _identity(cache)):
        differing.append(f"  features, the cache: {record['cache']} there, {now_cache} here")
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

    record: what checkpoint.json will hold, of `make_record`
    keep:   newest checkpoints that stay, besides the best

    Raises RuntimeError if the disk is full; the checkpoints before this one are whole.
    """
    weights = whole_weights(accelerator, head)
    moments = whole_moments(accelerator, head, optimizer)
    if accelerator.is_main_process:
        folder, best = run / "steps" / f"{record['step']:06d}", record["best"]["record"]
        with writing(folder), atomic_folder(folder) as tmp:
            save_file({n: t.cpu().contiguous() for n, t in weights.items()}, tmp / WEIGHTS)
            save_file(moments, tmp / MOMENTS)
            accelerator.unwrap_model(head).config.save_pretrained(tmp)
            write_json(tmp / RECORD, {"format_version": FORMAT_VERSION, **record})
        if best and best["step"] == record["step"]:
            write_json(run / "best.json", best)
        _forget_old(run, keep=keep)
    accelerator.wait_for_everyone()


def load_weights(checkpoint: Path, head: DraftHead) -> None:
    """Load a checkpoint's weights into a head that no launcher has wrapped yet."""
    head.load_state_dict(_tensors(checkpoint / WEIGHTS))


def restore(
    checkpoint: Path,
    *,
    accelerator: Accelerator,
    head: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Load the optimizer's state, after `load_weights` and the wrapping of both. Collective."""
    moments, step = _tensors(checkpoint / MOMENTS), load_record(checkpoint)["step"]
    set_moments(accelerator, head, optimizer, moments, step=step)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        set_master_weights(accelerator, head, _tensors(checkpoint / WEIGHTS))


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


def _tensors(file: Path) -> dict[str, Tensor]:
    """Raises ValueError that says how to go on without a damaged checkpoint."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{file} cannot be read ({error}). Delete {file.parent}: the run then goes on from the "
            "checkpoint before it."
        ) from error


def _identity(cache: FeatureCache) -> dict:
    return {
        "tokens": cache.manifest["num_tokens"],
        "dtype": cache.manifest["feature_dtype"],
        "sha256": sha256(cache.path / "manifest.json"),
    }


def _forget_old(run: Path, *, keep: int) -> None:
    best = best_record(run)
    for folder in checkpoints(run)[:-keep]:
        if not best or int(folder.name) != best["step"]:
            # Without its record it is no checkpoint, even if the removal is interrupted.
            (folder / RECORD).unlink()
            shutil.rmtree(folder)
