"""What is in a feature cache and what is wrong with it, as a person reads it."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from data.cache.calibration import Cost
from data.cache.evidence import Problem
from data.cache.reader import REPAIR
from data.cache.repair import dump_command, repair
from data.cache.verify import Findings, verify
from data.config import InspectConfig, TargetConfig
from data.dump.plan import ANEW
from data.files import readable_size, write_json, writing
from data.processes import stoppable
from data.replies.origin import describe_replies
from data.targets.model import fingerprint, fingerprint_differences

log = logging.getLogger(__name__)

RANGES = 8  # lines that the shards' features are shown in
CHANNELS = 5  # loudest channels shown
TARGET = "target:"


def inspect(config: InspectConfig) -> Findings:
    """Verify a cache, repair it first if that is asked for, and write the report if it is.

    Raises FileNotFoundError or ValueError where there is no plan to verify by, or a wrong target
    to repair with, and what a dump raises.
    """
    out = Path(config.cache).expanduser()
    if not (out / "plan.json").is_file():
        what = "no plan.json, which says what is in a cache" if out.is_dir() else "not there"
        raise FileNotFoundError(f"{out}: {what}. Give cache=FOLDER of a feature cache. {ANEW}")
    with stoppable("stopped: the same command begins again, and repairs what is left to repair"):
        found = repair(out, config.target) if config.repair else verify(out)
    if config.target.path:
        found.problems += _target_problems(config.target, found.plan.fingerprint)
    if config.json:
        with writing(Path(config.json)):
            write_json(Path(config.json), report(found))
    return found


def report(found: Findings) -> dict[str, Any]:
    """All that is known of a cache, ready for JSON."""
    plan = found.plan
    return {
        "cache": str(found.out),
        "is_whole": found.is_whole,
        "is_finished": found.is_finished,
        "problems": [asdict(problem) for problem in found.problems],
        "not_done": found.not_done,
        "strangers": found.strangers,
        "num_shards": len(plan.shards),
        "num_bytes": sum(record["bytes"] for record in found.records.values()),
        "num_sequences": len(plan.sequence_ids),
        "num_tokens": plan.num_tokens,
        "num_supervised": plan.num_supervised,
        "lengths": plan.statistics["lengths"],
        "hidden_size": plan.hidden_size,
        "feature_dtype": plan.feature_dtype,
        "bytes_per_token": plan.bytes_per_token,
        "calibration": found.calibration,
        "features": list(_features(found)),
        "loudest_channels": _loudest_channels(found),
        "replies": plan.replies,
        "fingerprint": plan.fingerprint,
        "settings": plan.settings,
        "versions": plan.versions,
    }


def text(found: Findings) -> str:
    """The report as lines: what is wrong first."""
    figures = report(found)
    lines = [*_verdict(found), "", *_columns(list(_facts(figures)))]
    if figures["features"]:
        lines += ["", *_columns(list(_feature_rows(figures)))]
    return "\n".join(lines)


def _verdict(found: Findings) -> Iterator[str]:
    shards, whole = len(found.plan.shards), len(found.records)
    if found.problems:
        rows = [("file", "found", "expected")]
        rows += [(problem.file, problem.found, problem.expected) for problem in found.problems]
        count = len(found.problems)
        yield f"{found.out}: {count} problem{'s' if count > 1 else ''}\n"
        yield from _columns(rows)
        if any(not problem.file.startswith(TARGET) for problem in found.problems):
            yield f"\nRepair it with `{REPAIR.format(found.out)}`."
    elif found.is_finished:
        yield f"{found.out}: whole. All {shards} shards, their tokens and features were checked."
    if not found.is_finished:
        yield f"{found.out}: unfinished, {whole} of {shards} shards are done. Go on with"
        yield f"  {dump_command(found.plan, found.out)}"
    if found.strangers:
        yield f"Not of this cache, and left alone: {', '.join(found.strangers)}"


def _facts(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What is known of a cache, each with its value; what has no value is left out."""
    lengths = {name: f"{value:.4g}" for name, value in figures["lengths"].items()}
    spread = "{min} to {max} tokens (median {median}, mean {mean}, 95 % up to {p95})"
    pairs, tokens = figures["num_supervised"], figures["num_tokens"]
    yield "sequences", f"{figures['num_sequences']:,}, {spread.format(**lengths)}"
    yield "tokens", f"{tokens:,}, {pairs:,} pairs supervised ({pairs / tokens:.1%})"
    yield "replies", describe_replies(figures["replies"], figures["fingerprint"])
    yield "features", f"{figures['feature_dtype']}, {figures['hidden_size']} a token"
    for name, cost in (figures["calibration"] or {}).get("costs", {}).items():
        yield "features", f"as {name}: {Cost(**cost)}"
    size = readable_size(figures["num_bytes"])
    yield "size", f"{size} in whole shards, {figures['bytes_per_token']:,} bytes a token"
    for group in ("fingerprint", "settings", "versions"):
        for name, value in figures[group].items():
            if value not in ("", None):
                yield group, f"{name}: {value}"


def _feature_rows(figures: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    yield "shards", "tokens", "rms", "largest"
    for part in figures["features"]:
        yield part["shards"], f"{part['num_tokens']:,}", *_numbers(part)
    for part in figures["loudest_channels"]:
        yield f"channel {part['channel']}", "", *_numbers(part)


def _numbers(part: dict[str, float]) -> tuple[str, str]:
    return f"{part['rms']:.4g}", f"{part['largest']:.4g}"


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Aligned columns. What the row before says in the first one is not repeated."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    before = ""
    for first, *rest in rows:
        cells = ["" if first == before else first, *rest]
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        yield f"  {line}".rstrip()
        before = first


def _features(found: Findings) -> Iterator[dict[str, Any]]:
    """Size of the features in ranges of shards; what is damaged or not done is left out."""
    if found.plan.feature_dtype == "int8" and found.calibration is None:
        return  # the stored numbers alone say nothing
    done = sorted(found.features)
    size = -(-len(done) // RANGES)
    for start in range(0, len(done), size or 1):
        part = done[start : start + size]
        sums = [found.features[index] for index in part]
        tokens = sum(found.records[index]["num_tokens"] for index in part)
        squares = sum(float(sum_.squares.sum()) for sum_ in sums)
        yield {
            "shards": f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}",
            "num_tokens": tokens,
            "rms": (squares / tokens / found.plan.hidden_size) ** 0.5,
            "largest": max(float(sum_.largest.max()) for sum_ in sums),
        }


def _loudest_channels(found: Findings) -> list[dict[str, Any]]:
    if not found.features or (found.plan.feature_dtype == "int8" and found.calibration is None):
        return []
    tokens = sum(record["num_tokens"] for record in found.records.values())
    rms = (torch.stack([sums.squares for sums in found.features.values()]).sum(0) / tokens).sqrt()
    largest = torch.stack([sums.largest for sums in found.features.values()]).amax(0)
    best = rms.topk(min(CHANNELS, len(rms))).indices.tolist()
    return [{"channel": c, "rms": float(rms[c]), "largest": float(largest[c])} for c in best]


def _target_problems(target: TargetConfig, theirs: dict[str, str]) -> Iterator[Problem]:
    ours = fingerprint(target)
    for line in fingerprint_differences(ours, theirs):
        key = line.partition(":")[0]
        yield Problem(f"{TARGET} {key}", ours.get(key, "absent"), theirs.get(key, "absent"))
