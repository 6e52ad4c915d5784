"""The picture of runs side by side: both losses and τ over the steps, τ over time."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from train.comparing.runs import Curves

INK, SOFT, GRID = "#22272e", "#9aa4b2", "#e4e8ee"
SMOOTHED = 50  # points that a loss curve keeps about: means over neighbours


def draw(labels: list[str], runs: list[Curves], path: Path) -> None:
    """Four panels with one line for each run, the best run first in the legend."""
    figure = Figure(figsize=(10, 7.2 + 0.2 * len(runs)), layout="constrained", facecolor="white")
    (smooth_l1, cross_entropy), (by_step, by_time) = figure.subplots(2, 2)
    colors = _colors(len(runs))
    for i, (name, run) in enumerate(zip(labels, runs, strict=True)):
        line: dict[str, Any] = {"color": colors[i], "linewidth": 1.4, "zorder": len(runs) - i}
        for axes, key in ((smooth_l1, "smooth_l1"), (cross_entropy, "cross_entropy")):
            axes.plot(*_smoothed(run.steps, key), label=name, **line)
        lengths = [row["heldout"]["acceptance_length"] for row in run.estimates]
        steps = [row["step"] for row in run.estimates]
        minutes = [row["elapsed"] / 60 for row in run.estimates]
        for axes, x in ((by_step, steps), (by_time, minutes)):
            axes.plot(x, lengths, marker="o", markersize=3, **line)
            _draw_interval(axes, x, run.estimates, color=colors[i])
    for axes in (smooth_l1, cross_entropy):
        _cut_off_divergence(axes)
    _style(smooth_l1, "Smooth-L1 on the next feature", "optimizer step")
    _style(cross_entropy, "cross-entropy with the target's distribution, nats", "optimizer step")
    _style(by_step, "τ on held-out chats, bonus token included", "optimizer step")
    _style(by_time, "τ on held-out chats, bonus token included", "minutes, all included")
    handles, names = smooth_l1.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", fontsize=8, frameon=False)
    figure.savefig(path, format="png", dpi=160)


def _draw_interval(
    axes: Axes, x: list[float], estimates: list[dict[str, Any]], *, color: Any
) -> None:
    """The 95 % interval of the best estimate: runs whose intervals overlap may well be equal."""
    if not estimates:
        return
    lengths = [row["heldout"]["acceptance_length"] for row in estimates]
    best = lengths.index(max(lengths))
    if between := estimates[best]["heldout"]["interval"]:
        axes.vlines(x[best], *between, color=color, linewidth=3, alpha=0.3)


def _cut_off_divergence(axes: Axes) -> None:
    """End the axis above the highest start, or one run that diverges hides all others."""
    curves = [np.asarray(line.get_ydata(), dtype=float) for line in axes.lines]
    if starts := [float(curve[0]) for curve in curves if len(curve)]:
        bottom, top = axes.get_ylim()
        axes.set_ylim(bottom, min(top, 1.05 * max(starts)))


def _colors(count: int) -> list[Any]:
    """Distinct ones while there are enough of them, then shades in the order of the runs."""
    if count <= 10:
        return [colormaps["tab10"](i) for i in range(count)]
    return [colormaps["viridis"](0.95 * i / (count - 1)) for i in range(count)]


def _smoothed(rows: list[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Steps and means over stretches of them: single steps differ by their chats."""
    width = max(1, len(rows) // SMOOTHED)
    parts = [rows[i : i + width] for i in range(0, len(rows), width)]
    means = [sum(row[key] for row in part) / len(part) for part in parts]
    return [part[-1]["step"] for part in parts], means


def _style(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.set_xlabel(unit, fontsize=9, color=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(SOFT)
    axes.tick_params(colors=INK, labelsize=8)
