"""Drafting a tree that grows where the head is confident (EAGLE-2, arXiv 2406.16858, section 4).

The value of a node is the product of the head's confidences on its path, which estimates the
chance that the target accepts it: V_i = Π_{j in path(i)} c_j (the paper's equation in 4.1). Each
layer expands the k nodes of highest value with k children each; in the end the best m of all
candidates stay (rerank, 4.2). A child is worth at most what its parent is, and where they tie the
shallower node is taken, so the kept nodes are a tree.

Candidates are numbered as SGLang numbers them: the k of layer 1, then k² of each later layer, by
the rank of their parent in the layer's beam and by their own. The trees equal SGLang's, which says
nothing about ties and in some of them keeps a node without its parent, which no verification can
reach; here the parent is kept.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from train.decode.children import likeliest
from train.decode.head_stream import HeadStream
from train.decode.tree import Tree

# (depth, the beam's tokens [B, k], the place of each one's parent in the beam before [B, k]) ->
# their children's tokens and confidences [B, k, k], by descending confidence
Expand = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Candidates:
    """M = k + (num_steps-1) k² guessed nodes, parents before children."""

    tokens: Tensor  # [B, M]
    confidences: Tensor  # [B, M]
    values: Tensor  # [B, M]
    parents: Tensor  # [B, M]  numbers of candidates; -1 is the root
    topk: int
    num_steps: int


def draft_dynamic(
    stream: HeadStream,
    hidden: Tensor,
    newest: Tensor,
    *,
    num_steps: int,
    topk: int,
    num_draft_tokens: int,
    ancestors: str,
) -> Tree:
    """Draft the best tree of `num_draft_tokens` nodes behind the newest token of each sequence.

    hidden:    [B, H]  the head's output at the last real pair
    newest:    [B]     the token of that pair
    ancestors: "path": a guessed pair sees the real ones and its ancestors. "rank": it sees the
               older pairs of its own rank in the beam instead. SGLang moves features when a beam
               is sorted anew, but neither keys nor values: this option predicts its acceptance.
    """
    first = likeliest(stream.logits(hidden[:, None]), topk)
    beam = hidden[:, None].expand(-1, topk, -1)  # [B, k, H]
    itself = torch.eye(topk, dtype=torch.bool, device=hidden.device).expand(len(newest), -1, -1)
    seen = itself[:, :, :0]  # [B, k, columns]

    def expand(depth: int, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal beam, seen
        beam = beam.gather(1, parents[:, :, None].expand_as(beam))
        if ancestors == "path":
            seen = seen.gather(1, parents[:, :, None].expand_as(seen))
        seen = torch.cat([seen, itself], dim=-1)
        beam = stream.guess(beam, tokens, depth, seen)
        children = likeliest(stream.logits(beam), topk)
        return children.tokens, children.confidences

    candidates = grow(first.tokens[:, 0], first.confidences[:, 0], expand, num_steps=num_steps)
    return rerank(candidates, newest, num_draft_tokens=num_draft_tokens)


def grow(tokens: Tensor, confidences: Tensor, expand: Expand, *, num_steps: int) -> Candidates:
    """Expand the k best nodes of each layer with k children.

    tokens, confidences: [B, k]  the root's children, by descending confidence
    """
    topk = tokens.shape[1]
    root = torch.full_like(tokens, -1)
    layers = [[tokens, confidences, confidences, root]]
    values, number = confidences, torch.arange(topk, device=tokens.device).expand_as(tokens)
    parents = torch.zeros_like(tokens)  # the root's place in the beam before
    for depth in range(1, num_steps):
        child_tokens, child_confidences = expand(depth, tokens, parents)  # [B, k, k]
        child_values = values[:, :, None] * child_confidences
        child_parents = number[:, :, None].expand_as(child_tokens)
        layer = (child_tokens, child_confidences, child_values, child_parents)
        candidates = [part.flatten(1) for part in layer]  # [B, k²] each
        layers.append(candidates)

        best = highest(candidates[2], topk)  # [B, k]
        tokens, values = candidates[0].gather(1, best), candidates[2].gather(1, best)
        parents = best // topk
        number = topk + (depth - 1) * topk**2 + best
    all_tokens, all_confidences, all_values, all_parents = (
        torch.cat(part, dim=1) for part in zip(*layers, strict=True)
    )
    return Candidates(
        tokens=all_tokens,
        confidences=all_confidences,
        values=all_values,
        parents=all_parents,
        topk=topk,
        num_steps=num_steps,
    )


def rerank(candidates: Candidates, newest: Tensor, *, num_draft_tokens: int) -> Tree:
    """Keep the best `num_draft_tokens` - 1 candidates of all layers, and put the root before them.

    newest: [B]  the token of the root
    """
    topk = candidates.topk
    kept = highest(candidates.values, num_draft_tokens - 1).sort(dim=1).values  # [B, N-1]
    root = torch.zeros_like(kept[:, :1])

    # Place n+1 holds the node of candidate n, place 0 the root, which is node 0.
    nodes = candidates.parents.new_zeros(len(kept), candidates.values.shape[1] + 1)
    numbers = torch.arange(1, num_draft_tokens, device=kept.device).expand_as(kept)
    nodes.scatter_(1, kept + 1, numbers)
    later = kept >= topk  # below the first layer
    return Tree(
        tokens=torch.cat([newest[:, None], candidates.tokens.gather(1, kept)], dim=1),
        parents=torch.cat([root, nodes.gather(1, candidates.parents.gather(1, kept) + 1)], dim=1),
        depths=torch.cat([root, torch.where(later, 2 + (kept - topk) // topk**2, 1)], dim=1),
        ranks=torch.cat([root, torch.where(later, (kept - topk) % topk, kept)], dim=1),
        confidences=torch.cat(
            [torch.ones_like(root).float(), candidates.confidences.gather(1, kept)], dim=1
        ),
        num_steps=candidates.num_steps,
    )


def highest(values: Tensor, count: int) -> Tensor:
    """Places of the `count` highest values, the first of equal ones first: [B, M] -> [B, count]."""
    # `topk` does not say which of equal values it takes.
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]
