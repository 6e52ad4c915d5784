"""An evaluation as a table, as JSON and as a picture."""

import logging
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from data.files import atomic_write, write_json

log = logging.getLogger(__name__)

COUNTING = """\
Counted as serving engines count. A round is one forward of the target that verifies drafts; the
first token of an answer comes from the prefill and is no round. α_n is the share of rounds in
which draft token n was accepted, among those in which 1 ... n-1 were. τ is tokens per round, the
bonus token that every round yields included: τ = 1 + accepted / rounds; τ-1 is without it.
A round counts whole, also where the answer ends inside it. Papers count a first draft token that
is always accepted: it is the bonus token of the round before."""
INK, SOFT, PALE, ACCENT = "#22272e", "#9aa4b2", "#c9d6e4", "#2f6fab"


def write_report(report: dict[str, Any], out: Path) -> None:
    """Write report.txt, acceptance.png and, last, report.json into `out`, each by rename."""
    out.mkdir(parents=True, exist_ok=True)
    with atomic_write(out / "report.txt") as tmp:
        tmp.write_text(table(report) + "\n", encoding="utf-8")
    with atomic_write(out / "acceptance.png") as tmp:
        draw(report, tmp)
    write_json(out / "report.json", report)
    log.info("report      %s", out)


def table(report: dict[str, Any]) -> str:
    """The report for a terminal, about 100 columns wide."""
    settings, overall, machine = report["settings"], report["overall"], report["machine"]
    steps = range(1, settings["num_steps"] + 1)
    header = ["", "answers", "tokens", "rounds", *(f"α{n}" for n in steps), "τ", "τ-1"]
    header += ["with", "without", "ratio"]
    rows = [_row(name, summary) for name, summary in report["categories"].items()]
    total = _row("all", overall)
    lines = [
        f"head      {settings['head']}",
        f"target    {settings['target']['path']}, {settings['dtype']} on {machine['device']}, "
        f"{machine['threads']} threads, torch {machine['torch']}, "
        f"transformers {machine['transformers']}",
        f"decoding  greedy chain of {settings['num_steps']}, temperature 0, batch size 1, up to "
        f"{settings['max_new_tokens']} tokens an answer to {Path(settings['prompts']).name}",
        "",
        *_aligned([header, *rows, total] if len(rows) > 1 else [header, total]),
        "",
        "accepted  " + (", ".join(_counts(overall)) or "no round"),
        f"speed     {_speeds(overall, '')}, prefill included",
        f"          {_speeds(overall, '_after_prefill')}, after the prefill",
        f"time      {_shares(overall)}",
        f"output    {_equality(report)}",
        *(f"          {_explained(difference)}" for difference in report["differences"][:8]),
    ]
    if report["too_long"]:
        lines.append(f"left out  {len(report['too_long'])}, as too long")
    lines += [f"WARNING   other target: {line}" for line in report["fingerprint_differences"]]
    return "\n".join([*lines, "", COUNTING])


def _row(name: str, summary: dict[str, Any]) -> list[str]:
    alpha = zip(summary["alpha"], summary["tried"], strict=True)
    speed = summary["tokens_per_second"]
    return [
        name,
        str(summary["answers"]),
        str(summary["tokens"]),
        str(summary["rounds"]),
        *(f"{rate:.3f}" if tried else "-" for rate, tried in alpha),
        f"{summary['acceptance_length']:.3f}" if summary["rounds"] else "-",
        f"{summary['acceptance_length_without_bonus']:.3f}" if summary["rounds"] else "-",
        f"{speed['with_head']:.1f}",
        f"{speed['without_head']:.1f}",
        f"{summary['speedup']:.2f}x",
    ]


def _aligned(rows: list[list[str]]) -> list[str]:
    """The first column to the left, figures to the right; speeds get a heading of their own."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    rule = "-" * len(lines[0])
    speeds = "tokens/s".rjust(len(lines[0]) - widths[-1] - 2)
    body = [*lines[1:-1], rule] if len(lines) > 2 else []
    return [speeds, lines[0], rule, *body, lines[-1]]


def _counts(summary: dict[str, Any]) -> list[str]:
    pairs = zip(summary["accepted"], summary["tried"], strict=True)
    return [f"{a} of {t} at step {n}" for n, (a, t) in enumerate(pairs, start=1) if t]


def _speeds(summary: dict[str, Any], suffix: str) -> str:
    speed, ratio = summary[f"tokens_per_second{suffix}"], summary[f"speedup{suffix}"]
    with_head, without = speed["with_head"], speed["without_head"]
    return f"{with_head:.1f} tokens/s with the head, {without:.1f} without ({ratio:.2f}x)"


def _shares(summary: dict[str, Any]) -> str:
    seconds = summary["seconds"]["with_head"]
    names = {"draft": "drafting", "verify": "verifying", "prefill": "prefill", "other": "other"}
    shares = (f"{names[k]} {100 * seconds[k] / seconds['total']:.1f} %" for k in names)
    return ", ".join(shares)


def _equality(report: dict[str, Any]) -> str:
    answers, equal = report["overall"]["answers"], report["outputs_equal"]
    if equal == answers:
        return f"{answers} of {answers} answers equal plain decoding token for token"
    ties = sum(difference["near_tie"] for difference in report["differences"])
    return f"{equal} of {answers} answers equal plain decoding; of the others {ties} are near-ties"


def _explained(difference: dict[str, Any]) -> str:
    place = f"{difference['prompt']} turn {difference['turn']}, token {difference['position']}"
    if difference["logit_gap"] is None:
        return f"{place}: one answer ends, the other goes on"
    kind = "near-tie" if difference["near_tie"] else "NOT a near-tie"
    return (
        f"{place}: {kind}, logits {difference['logit_gap']:.2g} apart where rounding moves them "
        f"by {difference['rounding']:.2g}"
    )


def draw(report: dict[str, Any], path: Path) -> None:
    """Two panels: α by draft step, and τ by category."""
    categories = report["categories"]
    height = max(3.6, 1.6 + 0.28 * len(categories))
    figure = Figure(figsize=(10, height), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    _draw_steps(left, report["overall"])
    _draw_lengths(right, report)
    settings = report["settings"]
    figure.suptitle(
        f"{Path(settings['target']['path']).name}, greedy chain of {settings['num_steps']}, "
        f"{report['overall']['tokens']:,} tokens",
        color=INK,
        fontsize=11,
    )
    figure.savefig(path, format="png", dpi=160)


def _draw_steps(axes: Axes, overall: dict[str, Any]) -> None:
    counted = [
        (n, rate, accepted, tried)
        for n, (rate, accepted, tried) in enumerate(
            zip(overall["alpha"], overall["accepted"], overall["tried"], strict=True), start=1
        )
        if tried
    ]
    steps, rates = [row[0] for row in counted], [row[1] for row in counted]
    axes.bar(steps, rates, color=ACCENT, width=0.6)
    for n, rate, accepted, tried in counted:
        label = f"{rate:.2f}\n{accepted:,}/{tried:,}"
        axes.annotate(
            label, (n, rate), (0, 3), textcoords="offset points", ha="center", fontsize=8, color=INK
        )
    axes.set_ylim(0, 1.15)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlim(0.4, len(overall["alpha"]) + 0.6)
    axes.set_xticks(range(1, len(overall["alpha"]) + 1))
    axes.set_xlabel("draft step", color=INK, fontsize=9)
    _style(axes, "α: accepted, given that all before were", grid="y")


def _draw_lengths(axes: Axes, report: dict[str, Any]) -> None:
    mean = report["overall"]["acceptance_length"]
    rows = sorted(
        (s["acceptance_length"], name) for name, s in report["categories"].items() if s["rounds"]
    )
    lengths, names = [row[0] for row in rows], [row[1] for row in rows]
    height = min(0.6, 0.2 * len(rows))
    axes.barh(names, 1, color=PALE, height=height)  # the bonus token, which needs no head
    axes.barh(names, [length - 1 for length in lengths], left=1, color=ACCENT, height=height)
    for y, length in enumerate(lengths):
        axes.annotate(
            f"{length:.2f}",
            (length, y),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=INK,
        )
    if len(rows) > 1:
        axes.axvline(mean, color=INK, linewidth=1, linestyle="--")
        axes.annotate(
            f"all: {mean:.2f}",
            (mean, 1),
            (4, -2),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            va="top",
            fontsize=8,
            color=INK,
        )
    axes.set_ylim(-0.7, max(len(rows), 1) - 0.3 + (len(rows) > 1) * 0.5)
    # Bars start at 0 so that they compare; a round yields 1 to K+1 tokens.
    axes.set_xlim(0, report["settings"]["num_steps"] + 1.3)
    axes.set_xlabel("tokens per target forward (pale: the bonus token)", color=INK, fontsize=9)
    _style(axes, "τ: acceptance length, bonus token included", grid="x")


def _style(axes: Axes, title: str, *, grid: str) -> None:
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.grid(axis=grid, color="#e4e8ee", linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(SOFT)
    axes.tick_params(colors=INK, labelsize=8)
