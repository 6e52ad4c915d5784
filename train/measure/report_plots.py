"""The pictures of an evaluation, each a matplotlib figure of its own."""

import base64
import io
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from train.measure.report_text import rows_of

INK, SOFT, GRID, PALE = "#22272e", "#8b96a5", "#e6eaf0", "#cfdbe8"
ACCENT, WARM, GREEN, VIOLET = "#2f6fab", "#d9822b", "#3b9c6d", "#7a5ea8"
SERIES = (WARM, GREEN, VIOLET, "#b5475f", "#6b7785")
PHASES = {"prefill": PALE, "draft": WARM, "verify": ACCENT, "other": SOFT}
NAMES = {
    "prefill": "reading the prompt",
    "draft": "drafting",
    "verify": "forwards of the target",
    "other": "other",
}


def data_uri(figure: Figure) -> str:
    """The figure as an SVG inside an address: a page that holds it needs no other file."""
    buffer = io.BytesIO()
    # Without a date and with fixed ids the same report gives the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "report"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained", facecolor="none")


def acceptance_by_step(report: dict[str, Any]) -> Figure:
    """α by draft step: bars for all prompts, a mark for each set."""
    figure = _figure(5.4, 3.5)
    axes = figure.subplots()
    overall = report["overall"]
    steps = [n for n, tried in enumerate(overall["tried"], start=1) if tried]
    rates = [overall["alpha"][n - 1] for n in steps]
    axes.bar(
        steps, rates, color=ACCENT, width=0.62, label="all prompts" if _several(report) else ""
    )
    top = list(rates)
    if _several(report):
        for color, (name, one) in zip(SERIES, report["sets"].items(), strict=False):
            shown = [n for n in steps if one["tried"][n - 1]]
            values = [one["alpha"][n - 1] for n in shown]
            axes.plot(shown, values, "o", color=color, markersize=6, mec="white", label=name)
            for n, value in zip(shown, values, strict=True):
                top[steps.index(n)] = max(top[steps.index(n)], value)
        figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=8)
    for n, rate, height in zip(steps, rates, top, strict=True):
        text = f"{rate:.2f}\n{overall['accepted'][n - 1]:,} of {overall['tried'][n - 1]:,}"
        _note(axes, text, (n, height), (0, 6), ha="center", va="bottom")
    axes.set_xlim(0.4, len(overall["alpha"]) + 0.6)
    axes.set_xticks(range(1, len(overall["alpha"]) + 1))
    axes.set_ylim(0, min(1.22, max([0.4, *top]) * 1.35))
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= 1])
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    _style(axes, x="draft step", y="accepted, if all before were", grid="y")
    return figure


def length_by_set(report: dict[str, Any]) -> Figure:
    """τ of each set, or of each category of an only set, with its interval."""
    rows = [row for row in rows_of(report) if row[1]["rounds"]][::-1]
    figure = _figure(5.4, max(2.0, 1.1 + 0.42 * len(rows)))
    axes = figure.subplots()
    lengths = [one["acceptance_length"] for _, one in rows]
    ends = []
    for y, (name, one) in enumerate(rows):
        length, between = one["acceptance_length"], one["interval"]
        color = ACCENT if name == "all" or len(rows) == 1 else "#6f9cc6"
        axes.barh(y, 1, color=PALE, height=0.56)  # the bonus token, which needs no head
        axes.barh(y, length - 1, left=1, color=color, height=0.56)
        if between:
            axes.plot(between, [y, y], color=INK, linewidth=1.4, solid_capstyle="butt")
        ends.append(max(length, *(between or [length])))
        _note(axes, f"{length:.2f}", (ends[-1], y), (6, 0), va="center")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_xlim(0, max([*ends, *lengths, 1.5]) * 1.12)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    _style(axes, x="tokens per target forward (pale: the bonus token)", grid="x")
    return figure


def reliability(report: dict[str, Any]) -> Figure:
    """Measured acceptance against the head's confidence, and how many draft tokens stand there."""
    figure = _figure(5.4, 4.4)
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=[3.2, 1])
    bins = report["calibration"]["bins"]
    nodes = np.array([one["nodes"] for one in bins], dtype=float)
    confidence = np.array([one["confidence"] for one in bins])
    accepted = np.array([one["accepted"] for one in bins])
    dashes: Any = (0, (4, 3))
    axes.plot([0, 1], [0, 1], color=SOFT, linewidth=1, linestyle=dashes, label="as sure as right")
    axes.legend(loc="upper left", frameon=False, fontsize=8, labelcolor=SOFT)
    # What chance alone may do to a share of so few: two standard errors.
    error = 2 * np.sqrt(np.maximum(accepted * (1 - accepted), 0.25 / nodes) / nodes)
    low, high = np.clip(accepted - error, 0, 1), np.clip(accepted + error, 0, 1)
    axes.vlines(confidence, low, high, color=PALE, linewidth=3)
    axes.plot(confidence, accepted, color=ACCENT, linewidth=1.2, alpha=0.5)
    sizes = 14 + 70 * np.sqrt(nodes / nodes.max())
    axes.scatter(confidence, accepted, sizes, color=ACCENT, edgecolors="white", zorder=3)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlim(-0.01, 1.01)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    _style(axes, y="accepted", grid="both")
    below.bar([(one["from"] + one["to"]) / 2 for one in bins], nodes, width=0.042, color="#6f9cc6")
    below.set_yscale("log")
    _plain_numbers(below.yaxis)
    below.set_ylim(bottom=0.7)
    below.xaxis.set_major_formatter(PercentFormatter(1))
    _style(below, x="the head's confidence in a draft token", y="draft tokens", grid="y")
    return figure


def time_by_phase(report: dict[str, Any]) -> Figure:
    """Milliseconds per token by phase, with the head and without."""
    overall = report["overall"]
    figure = _figure(8.6, 2.0)
    axes = figure.subplots()
    ways = [("without_head", "plain decoding"), ("with_head", "with the head")]
    names = ["prefill", "draft", "verify", "other"]
    ends = []
    for y, (way, _) in enumerate(ways[::-1]):
        left, seconds = 0.0, overall["seconds"][way]
        tokens = seconds["total"] * overall["tokens_per_second"][way]
        for name in names:
            value = max(0.0, 1000 * seconds[name] / tokens) if tokens else 0.0
            axes.barh(y, value, left=left, color=PHASES[name], height=0.58, edgecolor="white")
            left += value
        ends.append(left)
        _note(axes, f"{left:.1f} ms a token", (left, y), (6, 0), va="center")
    axes.set_yticks(range(2), [text for _, text in ways[::-1]])
    axes.set_xlim(0, max([*ends, 1e-3]) * 1.2)
    axes.set_ylim(-0.5, 1.5)
    handles = [matplotlib.patches.Patch(color=PHASES[n], label=NAMES[n]) for n in names]
    figure.legend(handles=handles, loc="outside upper left", ncols=4, frameon=False, fontsize=8)
    _style(axes, x="milliseconds per token", grid="x")
    return figure


def forward_costs(report: dict[str, Any]) -> Figure:
    """Seconds of a forward of target and head over so many tokens."""
    figure = _figure(4.6, 3.3)
    axes = figure.subplots()
    costs = report["costs"]
    for key, color, name in (("target", ACCENT, "target"), ("draft", WARM, "head")):
        times = [1000 * value for value in costs[key]]
        axes.plot(costs["rows"], times, "o-", color=color, markersize=4, linewidth=1.6, mec="white")
        _note(axes, name, (costs["rows"][-1], times[-1]), (-4, 7), ha="right", color=color)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _plain_numbers(axes.xaxis)
    _plain_numbers(axes.yaxis)
    axes.set_xticks(costs["rows"])
    axes.margins(y=0.18)
    _style(axes, x="tokens in one forward", y="milliseconds", grid="both")
    return figure


def speedup_by_batch(report: dict[str, Any]) -> Figure:
    """Expected speed-up by batch size, where it falls below 1, and the measured one."""
    figure = _figure(4.6, 3.3)
    axes = figure.subplots()
    model = report["speed_model"]
    sizes = [one["batch_size"] for one in model["by_batch_size"]]
    expected = [one["speedup"] for one in model["by_batch_size"]]
    measured = report["overall"]["speedup_after_prefill"]
    top = max([*expected, measured, 1]) * 1.25
    axes.axhspan(0, 1, color="#fbf1e6", zorder=0)
    axes.axhline(1, color=WARM, linewidth=1, linestyle=(0, (4, 3)))
    _note(axes, "as fast as plain decoding", (sizes[-1], 1), (0, 4), ha="right", color=WARM)
    axes.plot(sizes, expected, "o-", color=ACCENT, markersize=4, linewidth=1.6, mec="white")
    place = (report["settings"]["batch_size"], measured)
    axes.plot(*place, "D", color=INK, markersize=7, mec="white", zorder=4)
    _note(axes, f"measured {measured:.2f}x", place, (9, -3), va="top")
    axes.set_xscale("log", base=2)
    _plain_numbers(axes.xaxis)
    axes.set_xticks(sizes)
    axes.set_ylim(0, top)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    _style(axes, x="sequences decoded at once (batch size)", y="expected speed-up", grid="y")
    return figure


def _several(report: dict[str, Any]) -> bool:
    return len(report["sets"]) > 1


def _plain_numbers(axis: Any) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _note(
    axes: Axes,
    text: str,
    place: tuple[float, float],
    offset: tuple[float, float],
    *,
    color: str = INK,
    **how: Any,
) -> None:
    axes.annotate(
        text,
        place,
        offset,
        textcoords="offset points",
        fontsize=8,
        color=color,
        **how,
    )


def _style(axes: Axes, *, x: str = "", y: str = "", grid: Any = "y") -> None:
    axes.set_facecolor("none")
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(x, color=INK, fontsize=9)
    axes.set_ylabel(y, color=INK, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(SOFT)
    axes.tick_params(colors=INK, labelsize=8, length=3)
