"""Verifying: what the target accepts of a tree, from one forward over all its nodes.

`matching` and `recursive_rejection` leave the target's distribution as it is; `typical` does not.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from train.decode.sampling import Typical, inverse_cdf
from train.decode.tree import Tree


@dataclass(frozen=True)
class Verdict:
    """The deepest accepted node of each tree, and the target's own token after it."""

    ends: Tensor  # [B]  0, the root, if nothing was accepted
    bonus: Tensor  # [B]


def matching(tree: Tree, predicted: Tensor) -> Verdict:
    """Follow the target's own choices from the root for as long as they are in the tree.

    predicted: [B, N]  what the target chooses after each node

    With the argmax this is greedy verification. With samples it is exact, too, for children that
    are a function of the text (the likeliest tokens): whatever the tree, the token after a text is
    one draw from the target's distribution. It is the rule of SpecInfer (arXiv 2305.09781,
    algorithm 2) and EAGLE for draft distributions q that are point masses: child x is accepted
    with probability p(x), and the residual norm(max(0, p - q)) is p without x.
    """
    chosen = tree.tokens == predicted.gather(1, tree.parents)  # [B, N]
    chosen[:, 0] = True
    ends = _deepest(tree, _connected(tree, chosen))
    return Verdict(ends, predicted.gather(1, ends[:, None])[:, 0])


def recursive_rejection(
    tree: Tree, target_probs: Tensor, generators: list[torch.Generator]
) -> Verdict:
    """Speculative sampling over siblings that were drawn without replacement.

    target_probs: [B, N, V]  after each node
    generators:   one for each sequence

    SpecInfer's multi-step speculative sampling, EAGLE's algorithm 1: with the head's distribution
    q and the target's p at a node, child x is accepted with probability min(1, p(x) / q(x)). If it
    is not, p becomes the residual norm(max(0, p - q)); and as the next child was drawn without
    replacement, q loses x and is normalised again. After the last child the token is drawn from
    what is left of p. The next token then has the distribution p, whatever q is.
    """
    assert tree.draft_probs is not None
    parents = tree.parents.tolist()
    tokens = tree.tokens.tolist()
    ends, bonus = [], []
    for b, generator in enumerate(generators):
        end, token = _walk(tokens[b], parents[b], tree, b, target_probs[b], generator)
        ends.append(end)
        bonus.append(token)
    device = tree.tokens.device
    return Verdict(torch.tensor(ends, device=device), torch.tensor(bonus, device=device))


def _walk(
    tokens: list[int],
    parents: list[int],
    tree: Tree,
    b: int,
    target_probs: Tensor,
    generator: torch.Generator,
) -> tuple[int, int]:
    """The end and the bonus token of one tree. target_probs: [N, V]"""
    assert tree.draft_probs is not None
    node = 0
    while True:
        children = [n for n in range(1, len(tokens)) if parents[n] == node]
        draft = tree.draft_probs[b, tree.inner.index(node)] if children else target_probs[node]
        place, left = sibling(
            target_probs[node], draft, [tokens[child] for child in children], generator
        )
        if place is None:
            uniform = torch.rand((), generator=generator, dtype=torch.float64)
            return node, int(inverse_cdf(left, uniform.to(left.device)))
        node = children[place]


def sibling(
    target_probs: Tensor, draft_probs: Tensor, tokens: list[int], generator: torch.Generator
) -> tuple[int | None, Tensor]:
    """Which of a node's children is accepted, and what is left of the target's distribution.

    target_probs: [V]
    draft_probs:  [V]  from which `tokens` were drawn, one after the other without replacement
    returns       the place in `tokens`, or None; and [V]
    """
    for place, token in enumerate(tokens):
        rest = draft_probs.sum()
        if draft_probs[token] == 0:  # all that the head holds possible was drawn before
            break
        uniform = torch.rand((), generator=generator, dtype=torch.float64)
        if uniform * draft_probs[token] / rest < target_probs[token]:
            return place, target_probs
        left = (target_probs - draft_probs / rest).clamp(min=0)
        if left.sum() == 0:  # p = q but for rounding: nothing was to be rejected
            return place, target_probs
        target_probs = left / left.sum()
        draft_probs = draft_probs.index_fill(0, torch.tensor(token, device=draft_probs.device), 0.0)
    return None, target_probs


def typical(tree: Tree, target_probs: Tensor, uniforms: Tensor, rule: Typical) -> Verdict:
    """Medusa's typical acceptance (arXiv 2401.10774, section 2.3.1). LOSSY.

    target_probs: [B, N, V]  after each node
    uniforms:     [B, N]     chooses the bonus token after each node

    A child x is accepted if p(x) > min(epsilon, delta · exp(-H(p))), and of the accepted paths the
    longest is taken. Answers do not have the target's distribution: too few unlikely tokens.
    """
    entropy = torch.special.entr(target_probs).sum(dim=-1)  # [B, N]
    least = (rule.delta * torch.exp(-entropy)).clamp(max=rule.epsilon)
    after_parent = target_probs.gather(
        1, tree.parents[:, :, None].expand(-1, -1, target_probs.shape[-1])
    )
    probability = after_parent.gather(2, tree.tokens[:, :, None])[:, :, 0]  # [B, N]
    accepted = probability > least.gather(1, tree.parents)
    accepted[:, 0] = True
    ends = _deepest(tree, _connected(tree, accepted))
    rows = torch.arange(len(ends), device=ends.device)
    return Verdict(ends, inverse_cdf(target_probs[rows, ends], uniforms[rows, ends]))


def _connected(tree: Tree, accepted: Tensor) -> Tensor:
    """Accepted nodes whose ancestors are all accepted: [B, N] -> [B, N]."""
    found = accepted
    for _ in range(tree.num_steps - 1):
        found = accepted & found.gather(1, tree.parents)
    return found


def _deepest(tree: Tree, accepted: Tensor) -> Tensor:
    """The first of the deepest accepted nodes: [B, N] -> [B]."""
    nodes = accepted.shape[1]
    order = tree.depths * nodes - torch.arange(nodes, device=accepted.device)
    return torch.where(accepted, order, -nodes).argmax(dim=1)
