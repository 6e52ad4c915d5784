"""The children of a tree's nodes: the head's likeliest tokens, or draws from its distribution."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from train.decode.sampling import Sampling


@dataclass(frozen=True)
class Children:
    """k children of each of W nodes, in the order of their ranks."""

    tokens: Tensor  # [B, W, k]
    confidences: Tensor  # [B, W, k]  the head's probabilities
    draft_probs: Tensor | None = None  # [B, W, V]  what they were drawn from, if they were


Choose = Callable[[Tensor, int], Children]  # (logits [B, W, V], k)


def likeliest(logits: Tensor, count: int) -> Children:
    """The `count` likeliest tokens, their probabilities at temperature 1."""
    probs = logits.float().softmax(dim=-1)
    if count == 1:  # by logits: different ones may have equal probabilities
        tokens = logits.argmax(dim=-1, keepdim=True)
        return Children(tokens, probs.gather(-1, tokens))
    confidences, tokens = probs.topk(count, dim=-1)
    return Children(tokens, confidences)


def drawn(sampling: Sampling, generators: list[torch.Generator]) -> Choose:
    """Draws without replacement from the head's distribution, tempered as the target's is.

    generators: one for each sequence, so that an answer does not depend on its batch
    """

    def choose(logits: Tensor, count: int) -> Children:
        probs = sampling.probabilities(logits)
        # The first of an exponential race at rates p_x is token x with probability p_x, the
        # second is drawn from the rest, and so on. A token of probability 0 never arrives: if it
        # is among the first `count`, its confidence says so.
        times = torch.stack(
            [
                torch.empty(probs.shape[1:], dtype=probs.dtype).exponential_(generator=generator)
                for generator in generators
            ]
        )
        tokens = (probs / times.to(probs.device)).topk(count, dim=-1).indices
        return Children(tokens, probs.gather(-1, tokens).float(), probs)

    return choose
