"""One round: a tree is drafted, the target runs it, and some of it is confirmed."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from train.decode.chain import draft_chain
from train.decode.children import drawn, likeliest
from train.decode.drafting import Drafting
from train.decode.dynamic_tree import draft_dynamic
from train.decode.head_stream import HeadStream
from train.decode.sampling import Sampling
from train.decode.static_tree import draft_static
from train.decode.tree import Tree
from train.decode.verify import Verdict, matching, recursive_rejection, typical


@dataclass(frozen=True)
class Round:
    """One draft tree and what the target accepted of it. Node 0 is the newest token, the root."""

    tokens: list[int]
    parents: list[int]  # -1 of the root; a parent comes before its children
    depths: list[int]
    confidences: list[float]  # the head's probability of the node given its parent; 1 of the root
    ranks: list[int]  # which child of its parent: 0 is the head's likeliest (or first drawn) token
    path: list[int]  # the accepted nodes from the root on, the root left out
    bonus: int  # the target's own token after the last of them


@dataclass(frozen=True)
class Confirmed:
    """What the target confirmed in one round, known on the host."""

    paths: list[list[int]]  # [B][*]  the accepted nodes, the root included
    tokens: list[list[int]]  # [B][*]  their tokens, the root's left out, and the bonus token

    @property
    def counts(self) -> list[int]:
        """New real pairs of each sequence: one more than the accepted drafts."""
        return [len(path) for path in self.paths]


def check_kind(drafting: Drafting, sampling: Sampling) -> None:
    """Raises ValueError for a way to draft that does not go with a way to choose tokens."""
    if drafting.children != "sampled":
        return
    if sampling.temperature == 0:
        raise ValueError(
            "children='sampled' draws drafts as the target draws tokens, but temperature is 0. "
            "Use children='top', or a temperature."
        )
    if sampling.typical:
        raise ValueError("Typical acceptance is for the likeliest children: use children='top'.")


def draft_tree(
    drafting: Drafting,
    sampling: Sampling,
    stream: HeadStream,
    hidden: Tensor,
    newest: Tensor,
    generators: list[torch.Generator],
) -> Tree:
    """Draft behind the newest token [B], from the head's output at its pair [B, H]."""
    if drafting.tree == "dynamic":
        return draft_dynamic(
            stream,
            hidden,
            newest,
            num_steps=drafting.num_steps,
            topk=drafting.topk,
            num_draft_tokens=drafting.num_draft_tokens,
            ancestors=drafting.ancestors,
        )
    choose = drawn(sampling, generators) if drafting.children == "sampled" else likeliest
    if drafting.tree == "static":
        return draft_static(stream, hidden, newest, paths=drafting.paths, choose=choose)
    return draft_chain(stream, hidden, newest, num_steps=drafting.num_steps, choose=choose)


def verify(
    tree: Tree,
    logits: Tensor,
    sampling: Sampling,
    *,
    uniforms: Callable[[Tensor], Tensor],
    generators: list[torch.Generator],
) -> Verdict:
    """What the target accepts.

    logits:   [B, N, V]  of the target after each node
    uniforms: gives the number that chooses the token after a node, by the node's depth [B, N]
    """
    if tree.draft_probs is not None:
        return recursive_rejection(tree, sampling.probabilities(logits), generators)
    if sampling.typical:
        probs = sampling.probabilities(logits)
        return typical(tree, probs, uniforms(tree.depths), sampling.typical)
    return matching(tree, sampling.choose(logits, uniforms(tree.depths)))


def confirm(tree: Tree, verdict: Verdict) -> Confirmed:
    """Bring a verdict to the host: the only time in a round that the device is waited for."""
    steps = tree.num_steps + 1
    paths = tree.paths_to(verdict.ends)
    columns = (
        tree.depths.gather(1, verdict.ends[:, None]),
        paths,
        tree.tokens.gather(1, paths),
        verdict.bonus[:, None],
    )
    confirmed = Confirmed([], [])
    for depth, *row in torch.cat(columns, dim=1).tolist():
        confirmed.paths.append(row[: depth + 1])
        confirmed.tokens.append([*row[steps + 1 : steps + 1 + depth], row[-1]])
    return confirmed


def record_rounds(tree: Tree, confirmed: Confirmed) -> list[Round]:
    """The round of each sequence."""
    parts = (tree.tokens, tree.parents, tree.depths, tree.confidences, tree.ranks)
    return [
        Round(
            tokens=tokens,
            parents=[-1, *parents[1:]],
            depths=depths,
            confidences=confidences,
            ranks=ranks,
            path=path[1:],
            bonus=new[-1],
        )
        for tokens, parents, depths, confidences, ranks, path, new in zip(
            *(part.tolist() for part in parts), confirmed.paths, confirmed.tokens, strict=True
        )
    ]
