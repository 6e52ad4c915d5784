"""What runs write, RUN/run.json and RUN/metrics.jsonl, read while they run or afterwards."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.files import read_json
from train.config import flat

MADE_BY = "python -m scripts.train_head"
RUN_FORMAT_VERSION = 1  # of run.json
TAIL = 0.1  # share of a run's steps, its last ones, over which its losses are averaged


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What one run has come to."""

    name: str
    settings: dict[str, Any]  # by their dotted names
    step: int  # the last one that was done
    steps: int  # of the whole run
    state: str  # finished, stopped early, unfinished, or why it cannot go on
    smooth_l1: float | None
    cross_entropy: float | None  # nats
    agreement: float | None
    best: dict[str, Any] | None  # the best held-out estimate, with "step"
    tokens_per_second: float | None  # supervised tokens, estimates and checkpoints left out
    seconds: float  # all of it

    @property
    def length(self) -> float:
        """Its best acceptance length; 0 where nothing was measured."""
        return self.best["acceptance_length"] if self.best else 0.0


@dataclass(frozen=True, kw_only=True)
class Curves:
    """A run's figures over its steps, for the picture."""

    steps: list[dict[str, Any]]  # one for each optimizer step
    estimates: list[dict[str, Any]]  # one for each held-out estimate


def find_runs(place: Path) -> list[Path]:
    """The folder itself if it is a run, else the runs in it and in folders of it.

    Raises FileNotFoundError if there is none.
    """
    files = [place / "run.json"] if (place / "run.json").is_file() else []
    files = files or [*place.glob("*/run.json"), *place.glob("*/*/run.json")]
    found = sorted(file.parent for file in files)
    if not found:
        what = "holds no run" if place.is_dir() else "does not exist"
        raise FileNotFoundError(
            f"{place} {what}. Expected a run's folder (with run.json) or a folder of them, as "
            f"`{MADE_BY} --multirun ... out=FOLDER` makes."
        )
    return found


def read_run(folder: Path, *, name: str) -> tuple[RunSummary, Curves]:
    """Raises ValueError for a run that another version wrote."""
    record = read_json(folder / "run.json", made_by=MADE_BY)
    if record.get("format_version") != RUN_FORMAT_VERSION:
        raise ValueError(
            f"{folder / 'run.json'} has format_version {record.get('format_version')}, but this "
            f"version reads {RUN_FORMAT_VERSION}. Leave that run out (runs=[...])."
        )
    rows = _rows(folder / "metrics.jsonl")
    steps = [row for row in rows if "smooth_l1" in row]
    estimates = [row for row in rows if "heldout" in row]
    tail = steps[-max(1, round(TAIL * len(steps))) :]
    seconds = sum(row["seconds"] for row in steps)
    best = max(estimates, key=lambda row: row["heldout"]["acceptance_length"], default=None)
    summary = RunSummary(
        name=name,
        settings=flat(record["settings"]),
        step=steps[-1]["step"] if steps else 0,
        steps=record["steps"],
        state=_state(folder, record, steps),
        smooth_l1=_mean(tail, "smooth_l1"),
        cross_entropy=_mean(tail, "cross_entropy"),
        agreement=_mean(tail, "agreement"),
        best={"step": best["step"], **best["heldout"]} if best else None,
        tokens_per_second=sum(row["supervised"] for row in steps) / seconds if steps else None,
        seconds=rows[-1]["elapsed"] if rows else 0.0,
    )
    return summary, Curves(steps=steps, estimates=estimates)


def _rows(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # the run is writing this line, or died while it did
    return rows


def _state(folder: Path, record: dict[str, Any], steps: list[dict[str, Any]]) -> str:
    if record["result"]:
        return "finished" if record["result"]["why"] == "all steps" else "stopped early"
    file = folder / "nonfinite.json"
    if file.is_file():
        broken = read_json(file, made_by=MADE_BY)
        if broken["step"] == (steps[-1]["step"] + 1 if steps else 1):
            return f"{broken['what']} not finite"
    return "unfinished"


def _mean(rows: list[dict[str, Any]], name: str) -> float | None:
    return sum(row[name] for row in rows) / len(rows) if rows else None
