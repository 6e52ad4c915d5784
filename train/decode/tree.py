"""What one round guesses: a tree of tokens for each sequence, its root the newest token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Tree:
    """B trees of N nodes each. Node 0 is the root, and a parent comes before its children."""

    tokens: Tensor  # [B, N]
    parents: Tensor  # [B, N]  the root's is itself
    depths: Tensor  # [B, N]  0 of the root
    ranks: Tensor  # [B, N]  which child of its parent: 0 is the likeliest, or the first drawn
    confidences: Tensor  # [B, N]  the head's probability of a node given its parent; root: 1
    num_steps: int  # the largest depth
    # With drawn children only: the head's distribution at each inner node, in the order of
    # `inner`, from which its children were drawn without replacement.
    draft_probs: Tensor | None = None  # [B, I, V]
    inner: tuple[int, ...] = ()  # [I]

    def ancestors(self) -> Tensor:
        """[B, N, N] bool: whether node j is node i or an ancestor of it."""
        nodes = self.tokens.shape[1]
        itself = torch.eye(nodes, dtype=torch.bool, device=self.tokens.device)
        found = itself.expand(len(self.tokens), -1, -1)
        parents = self.parents[:, :, None].expand(-1, -1, nodes)
        for _ in range(self.num_steps):
            found = itself | found.gather(1, parents)
        return found

    def paths_to(self, nodes: Tensor) -> Tensor:
        """The nodes from the root to some node of each tree: [B] -> [B, num_steps+1].

        Place d holds the node at depth d; places below the given node hold 0.
        """
        path = self.tokens.new_zeros(len(nodes), self.num_steps + 1)
        node = nodes[:, None]  # [B, 1]
        for _ in range(self.num_steps):
            path.scatter_(1, self.depths.gather(1, node), node)
            node = self.parents.gather(1, node)
        path[:, 0] = 0
        return path


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Lists of different lengths as one tensor, with zeros behind the shorter ones: [B, D]."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
