"""Draft trees as drawings: from the root at the left, each guess beside the others."""

from html import escape
from typing import Any

ROW, CHAR, GAP, PAD = 27, 7.3, 34, 8  # pixels: of a line of nodes, a letter, between columns
MAX_LETTERS = 14  # of a token's text


def tree_svg(tree: dict[str, Any]) -> str:
    """One tree of `example_trees` as an SVG element.

    Accepted nodes and the edges to them are strong; the bonus token, which the target itself put
    after the last of them, hangs there with a dashed edge.
    """
    parents = [*tree["parents"], tree["path"][-1] if tree["path"] else 0]
    labels = [_label(text) for text in (*tree["texts"], tree["bonus"])]
    accepted = {0, *tree["path"]}
    bonus = len(parents) - 1
    rows = _rows(parents, accepted | {bonus})
    depths = _depths(parents)
    columns = _columns(labels, depths)
    places = [
        (columns[depth], row * ROW + ROW / 2 + 4) for depth, row in zip(depths, rows, strict=True)
    ]
    widths = [
        len(label) * CHAR + 2 * PAD + (34 if 0 < n < bonus else 0) for n, label in enumerate(labels)
    ]

    edges, nodes = [], []
    for node, parent in enumerate(parents):
        kind = "bonus" if node == bonus else "accepted" if node in accepted else "refused"
        x, y = places[node]
        if parent >= 0:
            from_x, from_y = places[parent][0] + widths[parent], places[parent][1]
            bend = (from_x + x) / 2
            curve = f"C{bend:.0f} {from_y:.0f} {bend:.0f} {y:.0f} {x:.0f} {y:.0f}"
            edges.append(f'<path class="edge {kind}" d="M{from_x:.0f} {from_y:.0f} {curve}"/>')
        confidence = tree["confidences"][node] if 0 < node < bonus else None
        nodes.append(_node(labels[node], kind if node else "root", x, y, widths[node], confidence))
    width = max(x + w for (x, _), w in zip(places, widths, strict=True)) + 4
    height = (max(rows) + 1) * ROW + 8
    return (
        f'<svg class="tree" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="draft tree">{"".join(edges + nodes)}</svg>'
    )


def _node(label: str, kind: str, x: float, y: float, width: float, confidence: float | None) -> str:
    corner = f'x="{x:.0f}" y="{y - 10:.0f}"'
    box = f'<rect class="node {kind}" {corner} width="{width:.0f}" height="20" rx="5"/>'
    text = f'<text class="word {kind}" x="{x + PAD:.0f}" y="{y + 4:.0f}">{escape(label)}</text>'
    if confidence is None:
        return box + text
    share = "100%" if confidence >= 0.995 else f"{100 * confidence:.0f}%"
    place = f'x="{x + width - PAD + 2:.0f}" y="{y + 4:.0f}"'
    return f'{box}{text}<text class="share {kind}" text-anchor="end" {place}>{share}</text>'


def _label(text: str) -> str:
    """A token's text on one line, with its spaces to be seen."""
    shown = text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣") or "∅"
    return shown if len(shown) <= MAX_LETTERS else shown[: MAX_LETTERS - 1] + "…"


def _depths(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def _rows(parents: list[int], first: set[int]) -> list[int]:
    """A line for each leaf; a node stands on the line of its first child, an accepted one first."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    rows = [0] * len(parents)
    next_row = 0

    def place(node: int) -> None:
        nonlocal next_row
        below = sorted(children.get(node, []), key=lambda child: (child not in first, child))
        rows[node] = next_row
        for i, child in enumerate(below):
            if i:
                next_row += 1
            place(child)

    place(0)
    return rows


def _columns(labels: list[str], depths: list[int]) -> list[float]:
    """Where each depth begins: past the longest text of the one before."""
    columns = [2.0]
    for depth in range(max(depths)):
        longest = max(len(label) for label, at in zip(labels, depths, strict=True) if at == depth)
        columns.append(columns[-1] + longest * CHAR + 2 * PAD + (34 if depth else 0) + GAP)
    return columns
