"""Drafting a tree of one fixed shape (EAGLE, arXiv 2401.15077, section 4.1; Medusa's form).

A shape is a list of paths of child ranks: `[0]` is the likeliest token after the newest one, `[1]`
the second likeliest, `[0, 0]` the likeliest after `[0]`.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from train.decode.children import Choose
from train.decode.head_stream import HeadStream
from train.decode.tree import Tree

Path = tuple[int, ...]


@dataclass(frozen=True)
class _Level:
    """The inner nodes of one depth and all their children."""

    inner: list[int]  # nodes that have children
    parents: list[int]  # the place of each one's parent among the inner nodes one level up
    seen: list[list[bool]]  # which of the inner nodes below the root, these last, each one sees
    children: list[int]  # nodes
    places: list[int]  # the place of each child's parent in `inner`
    ranks: list[int]

    @property
    def width(self) -> int:
        return 1 + max(self.ranks)


def draft_static(
    stream: HeadStream,
    hidden: Tensor,
    newest: Tensor,
    *,
    paths: tuple[Path, ...],
    choose: Choose,
) -> Tree:
    """Draft the tree of the given shape behind the newest token of each sequence.

    hidden: [B, H]  the head's output at the last real pair
    newest: [B]     the token of that pair
    paths:  the nodes, parents before children; with children that are drawn, rank r is the draw
            number r
    """
    batch_size, nodes = len(newest), len(paths) + 1
    tokens = newest.new_zeros(batch_size, nodes)
    tokens[:, 0] = newest
    confidences = torch.ones(batch_size, nodes, device=newest.device)
    hidden, probs = hidden[:, None], []
    levels = _levels(paths)
    for depth, level in enumerate(levels):
        if depth:
            seen = torch.tensor(level.seen, device=newest.device).expand(batch_size, -1, -1)
            parents = hidden[:, level.parents]  # [B, I, H]
            hidden = stream.guess(parents, tokens[:, level.inner], depth, seen)
        found = choose(stream.logits(hidden), level.width)
        tokens[:, level.children] = found.tokens[:, level.places, level.ranks]
        confidences[:, level.children] = found.confidences[:, level.places, level.ranks]
        if found.draft_probs is not None:
            probs.append(found.draft_probs)
    number = {path: node for node, path in enumerate(((), *paths))}

    def fixed(values: list[int]) -> Tensor:
        return torch.tensor(values, device=newest.device).expand(batch_size, -1)

    return Tree(
        tokens=tokens,
        parents=fixed([0, *(number[path[:-1]] for path in paths)]),
        depths=fixed([0, *map(len, paths)]),
        ranks=fixed([0, *(path[-1] for path in paths)]),
        confidences=confidences,
        num_steps=len(levels),
        draft_probs=torch.cat(probs, dim=1) if probs else None,
        inner=tuple(node for level in levels for node in level.inner) if probs else (),
    )


@lru_cache(maxsize=8)
def _levels(paths: tuple[Path, ...]) -> list[_Level]:
    number = {path: node for node, path in enumerate(((), *paths))}
    levels, above, behind = [], [], []  # type: ignore[var-annotated]
    for depth in range(max(map(len, paths))):
        children = [path for path in paths if len(path) == depth + 1]
        inner = sorted({path[:-1] for path in children})
        if depth:
            behind += inner
        levels.append(
            _Level(
                inner=[number[path] for path in inner],
                parents=[above.index(path[:-1]) for path in inner if depth],
                seen=[[path[: len(other)] == other for other in behind] for path in inner],
                children=[number[path] for path in children],
                places=[inner.index(path[:-1]) for path in children],
                ranks=[path[-1] for path in children],
            )
        )
        above = inner
    return levels


def best_shape(rates: Sequence[Sequence[float]], *, num_draft_tokens: int) -> list[list[int]]:
    """The shape to expect most of, built node by node (Medusa, arXiv 2401.10774, section 2.3.3).

    rates: [D][k]  how often the target's token is child number r of an accepted node, by depth:
                   a node's value is the product of the rates on its path, and τ = 1 + their sum

    The best child of a node that is in comes next, ties to the shallower one: so a parent, which
    is worth at least as much, comes before its children. Children that were never accepted are
    left out. Raises ValueError if none was.
    """
    shape: list[Path] = []
    heap: list[tuple[float, int, Path]] = []

    def offer_children(value: float, path: Path) -> None:
        if len(path) < len(rates):
            for rank, rate in enumerate(rates[len(path)]):
                if rate > 0:
                    heapq.heappush(heap, (-value * rate, len(path) + 1, (*path, rank)))

    offer_children(1.0, ())
    while heap and len(shape) < num_draft_tokens - 1:
        negative, _, path = heapq.heappop(heap)
        shape.append(path)
        offer_children(-negative, path)
    if not shape:
        raise ValueError(
            "The target accepted none of the head's guesses, so no tree can be shaped by them. "
            "Use more prompts, or a head that was trained for this target."
        )
    return [list(path) for path in sorted(shape, key=lambda path: (len(path), path))]
