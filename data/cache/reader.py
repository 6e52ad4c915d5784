"""The feature cache: a folder of shards with a manifest, one feature a token and nothing else.

CACHE/plan.json                   what is to be done; written before the first shard
CACHE/tokens.safetensors          input_ids, loss_mask, offsets of the whole plan
CACHE/shards/00000.safetensors    features [T, H], input_ids [T], loss_mask [T], offsets [S+1]
CACHE/shards/00000.json           counts, size and checksum; written after the shard
CACHE/manifest.json               written last: a cache without it is unfinished

Features are bfloat16, or float16 if the target is. With feature_dtype=int8 they are int8 and

CACHE/calibration.safetensors     channel_scale [H] float32, one for the whole cache
CACHE/calibration.json            its checksum, and what int8 costs; both written before any shard
CACHE/shards/00000.safetensors    also token_scale [T] float32
CACHE/shards/00000.json           also the calibration's checksum

with feature = features * token_scale * channel_scale (see data/cache/quantise.py): H + 9 bytes a
token instead of 2H + 5. `FeatureCache` reads them as float32.

Opening a cache compares sizes; `python -m scripts.inspect_cache` verifies what the files hold.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.cache.quantise import dequantise
from data.files import atomic_write, read_json, sha256, write_json

FORMAT_VERSION = 2
MADE_BY = "python -m scripts.dump_features"
REPAIR = "python -m scripts.inspect_cache cache={} repair=true"


@dataclass(frozen=True)
class CachedSequence:
    """One conversation's tokens and the target's features at each of them."""

    features: Tensor  # [T, H] bfloat16 or float16 as stored, float32 out of int8
    input_ids: Tensor  # [T] int64
    loss_mask: Tensor  # [T] bool: the token belongs to an assistant reply


@dataclass(frozen=True)
class Calibration:
    """What all shards of an int8 cache share."""

    channel_scale: Tensor  # [H] float32
    record: dict[str, Any]  # calibration.json: checksum, and what int8 costs

    @property
    def checksum(self) -> str:
        return self.record["sha256"]


def supervised_pairs(loss_mask: Tensor) -> Tensor:
    """Which pairs j, `(f_j, t_{j+1})`, count: `t_{j+1}` and `t_{j+2}` are of the same reply.

    loss_mask: [T]    bool; replies are separated by at least one False
    returns    [T-1]  bool; the last pair has no `t_{j+2}` and never counts
    """
    pairs = torch.zeros(max(len(loss_mask) - 1, 0), dtype=torch.bool, device=loss_mask.device)
    if len(loss_mask) > 2:
        pairs[:-1] = loss_mask[1:-1] & loss_mask[2:]
    return pairs


def supervised_counts(loss_mask: Tensor, offsets: Tensor) -> Tensor:
    """Supervised pairs of each of many sequences.

    loss_mask: [N]    bool, all sequences after each other
    offsets:   [S+1]  int64; sequence s is rows offsets[s]:offsets[s+1]
    returns    [S]    int64
    """
    both = torch.zeros(len(loss_mask) + 1, dtype=torch.int64)
    both[2:] = (loss_mask[:-1] & loss_mask[1:]).cumsum(0)
    # both[n]: pairs of neighbours (i-1, i) that are supervised, for all i < n. Inside a sequence
    # i runs from its third token: the first pair's tokens are t_1 and t_2.
    start = torch.minimum(offsets[:-1] + 2, offsets[1:])
    return both[offsets[1:]] - both[start]


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file by rename."""
    with atomic_write(path) as tmp:
        save_file(tensors, tmp)


def shard_path(cache: Path, index: int) -> Path:
    return cache / "shards" / f"{index:05d}.safetensors"


def write_shard(
    cache: Path,
    index: int,
    *,
    stored: dict[str, Tensor],
    input_ids: Tensor,
    loss_mask: Tensor,
    offsets: Tensor,
    statistics: dict[str, float],
    calibration: Calibration | None,
) -> dict[str, Any]:
    """Write one shard by rename, then the record that makes it valid. Returns the record.

    stored:      features [T, H], and token_scale [T] if they are int8
    input_ids:   [T]    int32
    loss_mask:   [T]    bool
    offsets:     [S+1]  int64, from 0
    calibration: what the features were quantised with
    """
    path = shard_path(cache, index)
    tensors = {**stored, "input_ids": input_ids, "loss_mask": loss_mask, "offsets": offsets}
    path.parent.mkdir(exist_ok=True)
    save_tensors(path, tensors)
    record = {
        "file": str(path.relative_to(cache)),
        "num_sequences": len(offsets) - 1,
        "num_tokens": len(input_ids),
        "num_supervised": int(supervised_counts(loss_mask, offsets).sum()),
        "bytes": path.stat().st_size,
        "sha256": sha256(path),
        "statistics": statistics,
    }
    if calibration is not None:
        record["calibration"] = calibration.checksum
    write_json(path.with_suffix(".json"), record)
    return record


def shard_record(cache: Path, index: int, *, checksum: bool) -> dict[str, Any] | None:
    """The record of a finished shard; None if the shard has to be done (again).

    The size must match, and with `checksum` the content too, which reads the whole file.
    """
    path = shard_path(cache, index)
    try:
        record = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        whole = path.stat().st_size == record["bytes"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return record if whole and (not checksum or sha256(path) == record.get("sha256")) else None


def calibration_path(cache: Path) -> Path:
    return cache / "calibration.safetensors"


def calibration_record(cache: Path) -> dict[str, Any] | None:
    """The record of the calibration; None if it has to be done (again)."""
    path = calibration_path(cache)
    try:
        record = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        return record if sha256(path) == record["sha256"] else None
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError, KeyError):
        return None


def read_calibration(cache: Path, record: dict[str, Any] | None) -> Calibration:
    """The calibration of an int8 cache.

    record: what there should be: the manifest's, or that of `calibration_record`

    Raises ValueError if it is not that.
    """
    path = calibration_path(cache)
    if record is None or not path.is_file() or sha256(path) != record["sha256"]:
        raise ValueError(
            f"{path} is {'damaged' if path.is_file() else 'missing'}, and without it the int8 "
            f"features mean nothing. Run the same `{MADE_BY} … out={cache}` again: it computes it "
            "anew, and checks that it is the same."
        )
    return Calibration(load_file(path)["channel_scale"], record)


class FeatureCache:
    """A finished cache, memory-mapped. Sequences are numbered through all shards."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError or ValueError that say what is wrong and what to run."""
        self.path = path
        self.manifest = read_manifest(path)
        self.fingerprint: dict[str, str] = self.manifest["fingerprint"]
        self.hidden_size: int = self.manifest["hidden_size"]
        self.calibration: Calibration | None = None
        if self.manifest["feature_dtype"] == "int8":
            self.calibration = read_calibration(path, self.manifest["calibration"])
        self.ids: list[str] = read_json(path / "plan.json", made_by=MADE_BY)["sequence_ids"]
        self._shards = [_open_shard(path, record) for record in self.manifest["shards"]]
        self._offsets = [shard.get_tensor("offsets") for shard in self._shards]
        # The first sequence of each shard, and one past the last of all.
        counts = torch.tensor([0] + [len(offsets) - 1 for offsets in self._offsets])
        self._first = counts.cumsum(0)
        self.lengths = torch.cat([offsets.diff() for offsets in self._offsets])  # [S] int64
        if len(self.ids) != len(self.lengths):
            raise ValueError(
                f"{path}/plan.json names {len(self.ids)} sequences, but the shards hold "
                f"{len(self.lengths)}. Dump again into an empty folder: `{MADE_BY}`."
            )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def dtype(self) -> torch.dtype:
        """Of the features that `sequence` returns."""
        stored = getattr(torch, self.manifest["feature_dtype"])
        return torch.float32 if stored == torch.int8 else stored

    @cached_property
    def num_supervised(self) -> Tensor:
        """Supervised pairs of each sequence, [S] int64."""
        counts = [
            supervised_counts(shard.get_tensor("loss_mask"), offsets)
            for shard, offsets in zip(self._shards, self._offsets, strict=True)
        ]
        return torch.cat(counts)

    def sequence(self, index: int) -> CachedSequence:
        """One sequence. Safe to call from a thread; only its own rows are read."""
        shard, rows = self._rows(index)
        features = shard.get_slice("features")[rows]
        if self.calibration is not None:
            token_scale = shard.get_slice("token_scale")[rows]
            features = dequantise(features, token_scale, self.calibration.channel_scale)
        return CachedSequence(features, *self.tokens(index))

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """input_ids [T] int64 and loss_mask [T] of one sequence, without reading its features."""
        shard, rows = self._rows(index)
        return shard.get_slice("input_ids")[rows].long(), shard.get_slice("loss_mask")[rows]

    def _rows(self, index: int) -> tuple[Any, slice]:
        """The open shard of a sequence, and its rows there."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        shard = int(torch.searchsorted(self._first, index, right=True)) - 1
        local = index - int(self._first[shard])
        return self._shards[shard], slice(*self._offsets[shard][local : local + 2].tolist())


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a finished cache."""
    if not path.is_dir():
        raise FileNotFoundError(f"There is no feature cache {path}. Make it with `{MADE_BY}`.")
    if not (path / "manifest.json").is_file() and (path / "plan.json").is_file():
        raise FileNotFoundError(
            f"The feature cache {path} is unfinished: it has a plan but no manifest.json. Run the "
            f"same `{MADE_BY} … out={path}` again; it goes on where it stopped."
        )
    manifest = read_json(path / "manifest.json", made_by=MADE_BY)
    check_version(manifest, path / "manifest.json")
    return manifest


def check_version(record: dict[str, Any], path: Path) -> None:
    """Raises ValueError unless `record` has the format that this code reads."""
    if record.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format_version {record.get('format_version')}, but this version reads "
            f"{FORMAT_VERSION}. Dump again into an empty folder: `{MADE_BY}`."
        )


def _open_shard(cache: Path, record: dict[str, Any]) -> Any:
    path = cache / record["file"]
    size = path.stat().st_size if path.is_file() else None
    if size != record["bytes"]:
        raise ValueError(
            f"Shard {path} has {'no file' if size is None else f'{size} bytes'}, but the manifest "
            f"says {record['bytes']} bytes. Repair it with `{REPAIR.format(cache)}`."
        )
    return safe_open(path, framework="pt")
