"""Runs side by side: the settings in which they differ, what they reached, and what it took.

Knows nothing of torch, so that a look at a sweep takes a second.
"""

import logging
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from data.files import atomic_write, write_json
from train.comparing.runs import RunSummary, find_runs, read_run
from train.config import CompareConfig

log = logging.getLogger(__name__)
FORMAT_VERSION = 1
# Settings by which a run is not another one, and those by which its τ is measured differently.
PLACES = ("out", "tracker", "log_every", "keep", "target.path", "target.device")
MEASURED_BY = ("features", "seed", "heldout.share", "heldout.max_tokens", "heldout.num_steps")
NOTES = """\
τ: best held-out acceptance length, bonus token included, with its 95 % interval over conversations;
α: acceptance rate of draft token n, given that those before it were accepted. smooth-l1, ce and
agree: means over the last tenth of the steps. tok/s: supervised tokens a second."""


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
        from train.comparing.picture import draw  # matplotlib takes longer than the table

        draw([label(run, differing) for run in summaries], curves, tmp)
    runs = [asdict(run) for run in summaries]
    write_json(out / "compare.json", {"format_version": FORMAT_VERSION, "runs": runs})
    return f"{table(summaries, differing)}\n\n{out / 'compare.png'}, {out / 'compare.json'}"


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
