"""How a round drafts: a chain, a tree of a fixed shape, or a tree that grows where it pays.

The sizes mean what SGLang's arguments of the same names mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass

TREES = ("chain", "static", "dynamic")
ANCESTORS = ("path", "rank")
CHILDREN = ("top", "sampled")

Paths = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """What the head guesses in one round. Raises ValueError for sizes that do not go together.

    `Drafting.chain`, `.static` and `.dynamic` are the usual ways to make one.
    """

    tree: str = "chain"
    num_steps: int  # depth of the tree: forwards of the head per round
    topk: int = 1  # children of a node
    num_draft_tokens: int  # nodes, with the root: the newest token of the sequence
    # Medusa's form of a static tree: the path of each node as ranks of children from the root,
    # [[0], [1], [0, 0]] for the best guess, the second best, and what follows the best.
    paths: tuple[tuple[int, ...], ...] = ()
    # What a guessed node attends to besides the real pairs. path: its ancestors. rank: the older
    # nodes of its beam rank, as SGLang stores keys and values (for predicting its acceptance).
    ancestors: str = "path"
    # top: the likeliest tokens. sampled: drawn from the head's distribution without replacement
    # (temperature above 0; chains and static trees).
    children: str = "top"

    @classmethod
    def chain(cls, num_steps: int, *, children: str = "top") -> "Drafting":
        """`num_steps` guesses in a row."""
        return cls(num_steps=num_steps, num_draft_tokens=num_steps + 1, children=children)

    @classmethod
    def static(cls, paths: Paths, *, children: str = "top") -> "Drafting":
        """A tree of one shape for all rounds (EAGLE-1), its nodes in Medusa's form."""
        return cls(
            tree="static",
            num_steps=max((len(path) for path in paths), default=0),
            topk=1 + max((max(path, default=0) for path in paths), default=0),
            num_draft_tokens=len(paths) + 1,
            paths=tuple(sorted((tuple(path) for path in paths), key=lambda p: (len(p), p))),
            children=children,
        )

    @classmethod
    def dynamic(
        cls, *, num_steps: int, topk: int, num_draft_tokens: int, ancestors: str = "path"
    ) -> "Drafting":
        """A tree that grows where the head is confident (EAGLE-2)."""
        return cls(
            tree="dynamic",
            num_steps=num_steps,
            topk=topk,
            num_draft_tokens=num_draft_tokens,
            ancestors=ancestors,
        )

    def __post_init__(self) -> None:
        for name, allowed in (("tree", TREES), ("ancestors", ANCESTORS), ("children", CHILDREN)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, expected one of {', '.join(allowed)}."
                )
        if self.ancestors == "rank" and self.tree != "dynamic":
            raise ValueError(
                f"ancestors='rank' belongs to a dynamic tree, whose beam has ranks; tree is "
                f"{self.tree!r}."
            )
        if self.tree == "static":
            _check_paths(self.paths, self.children)
        for name in ("num_steps", "topk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1.")
        if self.tree == "chain":
            self._check_chain()
        elif self.tree == "dynamic":
            self._check_dynamic()

    @property
    def num_columns(self) -> int:
        """Columns of the head's cache that a round needs behind the real pairs, at most."""
        return max(self.num_draft_tokens, self.num_steps * self.topk)

    def _check_chain(self) -> None:
        if self.topk != 1 or self.num_draft_tokens != self.num_steps + 1:
            raise ValueError(
                f"A chain of {self.num_steps} steps has topk 1 and num_draft_tokens "
                f"{self.num_steps + 1} (the root is counted), not {self.topk} and "
                f"{self.num_draft_tokens}."
            )

    def _check_dynamic(self) -> None:
        most = 1 + self.topk + (self.num_steps - 1) * self.topk**2
        if not 2 <= self.num_draft_tokens <= most:
            raise ValueError(
                f"num_draft_tokens is {self.num_draft_tokens}, but a dynamic tree of num_steps "
                f"{self.num_steps} and topk {self.topk} has 2 to {most} nodes "
                "(the root is counted)."
            )
        if self.children != "top":
            raise ValueError(
                "children='sampled' cannot be had with a dynamic tree: which nodes it keeps "
                "depends on what was drawn, and kept tokens are no draws from the head's "
                "distribution any more. Use a chain or a static tree, or children='top'."
            )


def _check_paths(paths: Paths, children: str) -> None:
    known = {(), *(tuple(path) for path in paths)}
    if len(known) != len(paths) + 1 or len(known) < 2:
        raise ValueError(
            f"The paths of a static tree must be different and at least one; got {list(paths)}."
        )
    for path in known - {()}:
        if path[:-1] not in known or path[-1] < 0:
            raise ValueError(
                f"The path {list(path)} of a static tree hangs in the air: its parent must be "
                "there, too, and ranks count from 0."
            )
        if children == "sampled" and path[-1] and (*path[:-1], path[-1] - 1) not in known:
            raise ValueError(
                f"The path {list(path)} is draw number {path[-1]} of its parent, which says "
                "nothing without the draws before it: with children='sampled' those must be "
                "nodes, too."
            )
