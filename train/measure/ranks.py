"""Where the target's own tokens stand among the head's guesses, measured on the target's answers.

No tree has to be drafted for it. From every place of an answer the head follows the answer's own
tokens, on its own features as in drafting, all places at once. The rank of the next token among
the head's guesses, step by step, tells what any tree would have accepted there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.targets.model import Target
from train.head import DraftHead

LOGIT_ELEMENTS = 2**25  # of one output head product: 128 MB in float32
UNKNOWN = -1  # the answer ends before


@dataclass(frozen=True)
class Ranks:
    """Rank r of the answer's token n steps ahead: 0 is the head's best guess."""

    ranks: Tensor  # [M, D] int64; `topk` where it is not among the topk guesses, or UNKNOWN
    topk: int

    @property
    def tried(self) -> list[int]:
        """Places that count at each depth: all tokens before were among the guesses. [D]"""
        return [int(rows.sum()) for rows in self._followed()]

    @property
    def rates(self) -> list[list[float]]:
        """[D][k]  share of those whose token is guess number r."""
        rates = []
        for depth, rows in enumerate(self._followed()):
            found = self.ranks[rows, depth]
            counts = torch.bincount(found, minlength=self.topk + 1)[: self.topk]
            rates.append((counts.double() / max(1, len(found))).tolist())
        return rates

    def _followed(self) -> list[Tensor]:
        inside = (self.ranks >= 0) & (self.ranks < self.topk)  # [M, D]
        alive = torch.ones(len(self.ranks), dtype=torch.bool)
        followed = []
        for depth in range(self.ranks.shape[1]):
            followed.append(alive & (self.ranks[:, depth] != UNKNOWN))
            alive = alive & inside[:, depth]
        return followed


@torch.inference_mode()
def measure_ranks(
    target: Target,
    head: DraftHead,
    answers: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    num_steps: int,
    topk: int,
) -> Ranks:
    """Follow every place of some answers for `num_steps` steps.

    answers: tokens of a prompt, and of the target's greedy answer to it

    Raises ValueError if no answer is longer than the one token that needs no draft.
    """
    parts = [
        _of_answer(target, head, list(prompt), list(answer), num_steps, topk)
        for prompt, answer in answers
        if len(answer) > 1
    ]
    if not parts:
        raise ValueError(
            "All answers are one token long, which the prefill gives: there is nothing to draft. "
            "Raise max_new_tokens, or look at the prompts."
        )
    return Ranks(torch.cat(parts).cpu(), topk)


def _of_answer(
    target: Target,
    head: DraftHead,
    prompt: list[int],
    answer: list[int],
    num_steps: int,
    topk: int,
) -> Tensor:
    """[M, D]: from each place of one answer, the first one being its first token."""
    ids = torch.tensor(prompt + answer, device=target.device)
    dtype = head.fc.weight.dtype
    features = target.features(ids[None])[0, :-1].to(dtype)  # [T, H]  f_j of each pair
    embeddings = target.head.embed(ids[1:]).to(dtype)  # [T, H]  of t_{j+1}
    num_pairs = len(ids) - 1
    # The pair that reads the answer's first token guesses the second one; the last pair has no
    # next token to compare with.
    starts = torch.arange(len(prompt) - 1, num_pairs - 1, device=target.device)
    predicted = head(embeddings, features, [num_pairs], starts, num_steps)  # [D, M, H]
    ranks = torch.full((len(starts), num_steps), UNKNOWN, device=target.device)
    for step in range(num_steps):
        known = starts + step + 2 < len(ids)
        wanted = ids[starts[known] + step + 2]
        ranks[known, step] = _ranks(target, predicted[step][known], wanted, topk)
    return ranks


def _ranks(target: Target, predicted: Tensor, wanted: Tensor, topk: int) -> Tensor:
    """Rank of each wanted token, or `topk`. predicted: [N, H], wanted: [N] -> [N]."""
    rows = max(1, LOGIT_ELEMENTS // len(target.head.weight))
    found = []
    for own, token in zip(predicted.split(rows), wanted.split(rows), strict=True):
        guesses = target.head.logits(own).topk(topk, dim=-1).indices  # [R, k]
        hits = guesses == token[:, None]
        found.append(torch.where(hits.any(-1), hits.int().argmax(-1), topk))
    return torch.cat(found) if found else wanted
