"""Reads a whole feature cache, and finds whatever is not as the dump wrote it.

The plan is the root: it has a checksum of its own, and that of the tokens. A shard is whole if the
record beside it or the manifest has its checksum, and what it holds is what the plan says. Records
and manifest then follow from plan and shards.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from data.cache.evidence import (
    Problem,
    Record,
    disagreement,
    json_problems,
    read_claim,
    shard_entry,
    state_of,
    unlike,
)
from data.cache.manifest import make_manifest
from data.cache.quantise import dequantise
from data.cache.reader import calibration_path, shard_path, supervised_counts
from data.chats.tokens import Tokens, load_tokens
from data.dump.plan import Plan, read_plan

PIECE = 2**22  # numbers of a shard looked at together
OURS = ("plan.json", "tokens.safetensors", "manifest.json", ".lock")
DTYPES = {"bfloat16": "BF16", "float16": "F16", "int8": "I8"}  # as safetensors calls them


@dataclass
class FeatureSums:
    """What the features of one shard are like."""

    squares: Tensor  # [H] float64: each channel squared, summed over the tokens
    largest: Tensor  # [H] float32: the largest magnitude of each channel
    not_finite: list[int]  # rows


@dataclass
class Findings:
    """What was found in one cache."""

    out: Path
    plan: Plan
    tokens: Tokens | None  # None: damaged
    manifest: Record | None  # as it is; None: absent or no JSON
    calibration: Record | None = None  # of int8 features; None: damaged
    channel_scale: Tensor | None = None  # of int8 features
    problems: list[Problem] = field(default_factory=list)
    records: dict[int, Record] = field(default_factory=dict)  # of the shards that are whole
    features: dict[int, FeatureSums] = field(default_factory=dict)  # of the same
    not_done: list[int] = field(default_factory=list)  # shards that were never finished
    strangers: list[str] = field(default_factory=list)  # files of nothing in the plan

    @property
    def is_finished(self) -> bool:
        """Whether the dump came to its end, as far as can be seen."""
        return (self.out / "manifest.json").is_file()

    @property
    def is_whole(self) -> bool:
        return self.is_finished and not self.problems


def verify(out: Path) -> Findings:
    """Check every byte of a cache. Memory stays flat.

    Raises FileNotFoundError or ValueError where there is no plan to go by.
    """
    plan = read_plan(out)
    found = Findings(out, plan, None, read_claim(out / "manifest.json"))
    _check_tokens(found)
    if plan.feature_dtype == "int8":
        _check_calibration(found)
    shards = range(len(plan.shards))
    files = [shard_path(out, index) for index in shards]
    sizes = [file.stat().st_size if file.is_file() else 0 for file in files]
    with tqdm(total=sum(sizes), desc="verify", unit="B", unit_scale=True, delay=1) as bar:
        for index in shards:
            _check_shard(found, index)
            bar.update(sizes[index])
    if found.is_finished:
        _check_manifest(found)
    found.strangers = _strangers(found)
    return found


def _check_tokens(found: Findings) -> None:
    file = found.out / "tokens.safetensors"
    if problem := unlike(file.name, state_of(file), [{"sha256": found.plan.tokens_sha256}]):
        found.problems.append(problem)
    else:
        found.tokens = load_tokens(file)


def _check_calibration(found: Findings) -> None:
    file = calibration_path(found.out)
    record = file.with_suffix(".json")
    named = (read_claim(record), (found.manifest or {}).get("calibration"))
    claims = [claim for claim in named if isinstance(claim, dict)]
    if problem := unlike(file.name, state_of(file), claims):
        found.problems.append(problem)
    elif any(claim != claims[0] for claim in claims):
        found.problems.append(disagreement(record.name))
    else:
        found.calibration = claims[0]
        found.channel_scale = load_file(file)["channel_scale"]
        found.problems += json_problems(record, claims[0])


def _check_shard(found: Findings, index: int) -> None:
    path = shard_path(found.out, index)
    record, name = path.with_suffix(".json"), f"shards/{path.name}"
    claims = [c for c in (read_claim(record), shard_entry(found.manifest, index)) if c]
    if not claims and not found.is_finished and not record.exists():
        found.not_done.append(index)
        return
    state = state_of(path)
    contents = unlike(name, state, claims) or _read_shard(found, index)
    if isinstance(contents, Problem):
        found.problems.append(contents)
        return
    known, sums = contents
    good = [claim for claim in claims if _is_record(claim, {**state, **known})]
    if not good or any(claim != good[0] for claim in good):
        found.problems.append(disagreement(f"shards/{record.name}"))
        return
    found.records[index], found.features[index] = good[0], sums
    found.problems += json_problems(record, good[0], name=f"shards/{record.name}")


def _check_manifest(found: Findings) -> None:
    """A shard that is damaged is no problem of the manifest: its entry is believed."""
    shards = range(len(found.plan.shards))
    manifest = found.manifest or {}
    expected = {
        **make_manifest(found.out, found.plan),
        "shards": [found.records.get(index) or shard_entry(manifest, index) for index in shards],
    }
    if found.plan.feature_dtype == "int8":
        expected["calibration"] = found.calibration or manifest.get("calibration")
    found.problems += json_problems(found.out / "manifest.json", expected)


def _strangers(found: Findings) -> list[str]:
    """Files of a cache's folder that are not of this cache, left by a kill or put there."""
    shards = [shard_path(found.out, index) for index in range(len(found.plan.shards))]
    ours = [found.out / name for name in OURS] + shards
    ours += [path.with_suffix(".json") for path in shards]
    if found.plan.feature_dtype == "int8":
        calibration = calibration_path(found.out)
        ours += [calibration, calibration.with_suffix(".json")]
    there = {*found.out.glob("*"), *found.out.glob("shards/*")} - {found.out / "shards"}
    return sorted(str(path.relative_to(found.out)) for path in there - set(ours))


# --- one shard ---------------------------------------------------------------------------------


def _read_shard(found: Findings, index: int) -> Problem | tuple[Record, FeatureSums]:
    """What its record has to say, and sums over its features."""
    path = shard_path(found.out, index)
    name = f"shards/{path.name}"
    try:
        with safe_open(path, framework="pt") as shard:
            problem = _layout_problem(found, index, shard) or _token_problem(found, index, shard)
            if problem is not None:
                return Problem(name, *problem)
            sums = _sum_features(shard, found.channel_scale)
            offsets, loss_mask = shard.get_tensor("offsets"), shard.get_tensor("loss_mask")
    except SafetensorError as error:
        return Problem(name, str(error), "a safetensors file")
    if sums.not_finite:
        sequence = int(torch.searchsorted(offsets, sums.not_finite[0], right=True)) - 1
        chat = found.plan.sequence_ids[found.plan.shards[index][0] + sequence]
        found_here = f"{len(sums.not_finite)} features that are not finite, the first in {chat!r}"
        return Problem(name, found_here, "finite features")
    known: Record = {
        "file": name,
        "num_sequences": len(offsets) - 1,
        "num_tokens": len(loss_mask),
        "num_supervised": int(supervised_counts(loss_mask, offsets).sum()),
    }
    if found.plan.feature_dtype != "int8":
        known["statistics"] = {"max_abs": float(sums.largest.max())}
    elif found.calibration is not None:
        known["calibration"] = found.calibration["sha256"]
    return known, sums


def _layout_problem(found: Findings, index: int, shard: Any) -> tuple[str, str] | None:
    """Names, dtypes and shapes: (found, expected) of the first that is wrong."""
    plan, tokens = found.plan, found.tokens
    first, last = plan.shards[index]
    slices = [(name, shard.get_slice(name)) for name in shard.keys()]  # noqa: SIM118
    there = {n: (s.get_dtype(), s.get_shape()) for n, s in slices}
    count = there.get("input_ids", ("", [0]))[1][0]
    if tokens is not None:
        count = int(tokens.offsets[last] - tokens.offsets[first])
    expected = {
        "features": (DTYPES[plan.feature_dtype], [count, plan.hidden_size]),
        "input_ids": ("I32", [count]),
        "loss_mask": ("BOOL", [count]),
        "offsets": ("I64", [last - first + 1]),
    }
    if plan.feature_dtype == "int8":
        expected["token_scale"] = ("F32", [count])
    return next(
        (
            (f"{name} {there.get(name, 'absent')}", f"{name} {expected.get(name, 'absent')}")
            for name in sorted({**there, **expected})
            if there.get(name) != expected.get(name)
        ),
        None,
    )


def _token_problem(found: Findings, index: int, shard: Any) -> tuple[str, str] | None:
    """Whether the shard's tokens are those of the plan: (found, expected) of the first that is not.

    Damaged tokens are no problem of the shard: what it holds has a checksum of its own.
    """
    if found.tokens is None:
        return None
    first, last = found.plan.shards[index]
    offsets = found.tokens.offsets[first : last + 1]
    rows = slice(int(offsets[0]), int(offsets[-1]))
    expected = {
        "offsets": offsets - offsets[0],
        "input_ids": found.tokens.input_ids[rows],
        "loss_mask": found.tokens.loss_mask[rows],
    }
    for name, tensor in expected.items():
        there = shard.get_tensor(name)
        if not there.equal(tensor):
            at = int((there != tensor).nonzero()[0])
            return f"{name}[{at}] is {there[at].item()}", f"{tensor[at].item()}, as in the plan"
    return None


def _sum_features(shard: Any, channel_scale: Tensor | None) -> FeatureSums:
    features = shard.get_slice("features")
    is_int8 = features.get_dtype() == "I8"
    num_tokens, hidden_size = features.get_shape()
    sums = FeatureSums(
        torch.zeros(hidden_size, dtype=torch.float64), torch.zeros(hidden_size), not_finite=[]
    )
    step = max(PIECE // hidden_size, 1)
    for begin in range(0, num_tokens, step):
        rows = slice(begin, min(begin + step, num_tokens))
        piece = features[rows]  # [R, H]
        if is_int8:
            scale = torch.ones(hidden_size) if channel_scale is None else channel_scale
            piece = dequantise(piece, shard.get_slice("token_scale")[rows], scale)
        piece = piece.float()
        wrong = ~piece.isfinite().all(dim=1)
        sums.not_finite += (wrong.nonzero().squeeze(1) + begin).tolist()
        sums.squares += piece.square().sum(dim=0, dtype=torch.float64)
        torch.maximum(sums.largest, piece.abs().amax(dim=0), out=sums.largest)
    return sums


def _is_record(claim: Record, known: Record) -> bool:
    """Whether a record says all that is known, and nothing that a record does not say."""
    may_say = {*known, "statistics"} | ({"calibration"} & claim.keys())
    return claim.keys() == may_say and all(claim[key] == known[key] for key in known)
