"""Runs side by side: the settings in which they differ, what they reached, and what it took.

Reads what runs write, RUN/run.json and RUN/metrics.jsonl, while they run or afterwards. Knows
nothing of torch, so that a look at a sweep takes a second.
"""

import json
import logging
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from data.files import atomic_write, read_json, write_json
from train.config import CompareConfig, flat

log = logging.getLogger(__name__)
FORMAT_VERSION = 1
MADE_BY = "python -m scripts.train_head"
RUN_FORMAT_VERSION = 1  # of run.json
TAIL = 0.1  # share of a run's steps, its last ones, over which its losses are averaged
# Settings by which a run is not another one, and those by which its τ is measured differently.
PLACES = ("out", "tracker", "log_every", "keep", "target.path", "target.device")
MEASURED_BY = ("features", "seed", "heldout.share", "heldout.max_tokens", "heldout.num_steps")
NOTES = """\
τ: best held-out acceptance length, bonus token included, with its 95 % interval over conversations;
α: acceptance rate of draft token n, given that those before it were accepted. smooth-l1, ce and
agree: means over the last tenth of the steps. tok/s: supervised tokens a second."""


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


def compare(config: CompareConfig) -> str:
    """Write compare.png and compare.json into `config.out`, and return the table.

    Raises FileNotFoundError if there is no run.
    """
    places = [config.runs] if isinstance(config.runs, str) else list(config.runs)
    out = Path(config.out or places[0])
    folders = [folder for place in places for folder in find_runs(Path(place))]
    read = [read_run(folder, name=_name(folder, places)) for folder in folders]
    read.sort(key=lambda run: (-run[0].length, run[0].name))
    summaries, curves = [run[0] for run in read], [run[1] for run in read]
    differing = differing_settings(summaries)

    out.mkdir(parents=True, exist_ok=True)
    with atomic_write(out / "compare.png") as tmp:
        from train.compare_picture import draw  # matplotlib takes longer than the table

        draw([label(run, differing) for run in summaries], curves, tmp)
    runs = [asdict(run) for run in summaries]
    write_json(out / "compare.json", {"format_version": FORMAT_VERSION, "runs": runs})
    return f"{table(summaries, differing)}\n\n{out / 'compare.png'}, {out / 'compare.json'}"


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


def differing_settings(runs: list[RunSummary]) -> list[str]:
    """Names of the settings that are not the same in all runs, but for the places of things."""
    names = {name: None for run in runs for name in run.settings if name not in PLACES}
    return [name for name in names if len({str(run.settings.get(name)) for run in runs}) > 1]


def label(run: RunSummary, differing: list[str]) -> str:
    """The run's name, and what tells it from the others."""
    settings = (f"{name}={_short(run.settings.get(name))}" for name in differing)
    return f"{run.name}: {', '.join(settings)}" if differing else run.name


def table(runs: list[RunSummary], differing: list[str]) -> str:
    """The runs for a terminal, those with the longest acceptance first."""
    header = ["run", *differing, "steps", "smooth-l1", "ce", "agree", "τ", "95 %", "α", "best at"]
    rows = [[*header, "tok/s", "time", ""]]
    for run in runs:
        steps = f"{run.step}" if run.state == "finished" else f"{run.step} of {run.steps}"
        best = run.best or {}
        between = best.get("interval")
        rows.append(
            [
                run.name,
                *(_short(run.settings.get(name)) for name in differing),
                steps,
                _number(run.smooth_l1, 4),
                _number(run.cross_entropy, 3),
                _number(run.agreement, 3),
                _number(best.get("acceptance_length"), 3),
                f"{between[0]:.3f} - {between[1]:.3f}" if between else "-",
                " ".join(f"{rate:.3f}" for rate in best.get("alpha", ())) or "-",
                str(best.get("step", "-")),
                _number(run.tokens_per_second, 0),
                str(timedelta(seconds=round(run.seconds))),
                "" if run.state == "finished" else f"* {run.state}",
            ]
        )
    lines = [*_aligned(rows, left=1 + len(differing)), "", NOTES]
    if unlike := [name for name in differing if name in MEASURED_BY]:
        lines += [f"WARNING: {', '.join(unlike)} differ: τ is not measured on the same chats."]
    return "\n".join(lines)


def _name(folder: Path, places: list[str]) -> str:
    """The run's folder, below the one that was given if that is the only one."""
    if len(places) == 1 and folder != Path(places[0]):
        return str(folder.relative_to(places[0]))
    return str(folder)


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


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _aligned(rows: list[list[str]], *, left: int) -> list[str]:
    """The first `left` columns and the last one to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    lines = [
        "  ".join(
            cell.ljust(width) if i < left or i == last else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]
