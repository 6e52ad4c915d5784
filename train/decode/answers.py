"""Answers while they are written: what the loops know of each prompt on the host."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from train.decode.clock import Seconds
from train.decode.rounds import Round
from train.decode.sampling import Sampling
from train.decode.stops import Stops


@dataclass(frozen=True)
class Generation:
    """What one prompt was answered with."""

    tokens: list[int]  # the stop token included, if one was reached
    seconds: Seconds  # of the whole batch
    # Accepted draft tokens of each verification, before the answer is cut at a stop token or at
    # max_new_tokens, as vLLM counts. The first token comes from the prefill and is no round.
    accepted: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)  # if they were to be recorded


class Answer:
    """One growing answer, and the random numbers that choose its tokens."""

    def __init__(self, stops: Stops, sampling: Sampling, *, index: int, ahead: int = 0) -> None:
        """index: of the prompt in its batch; ahead: tokens that are chosen ahead at most"""
        self.tokens: list[int] = []
        self.latest: list[int] = []  # what the last round added
        self.accepted: list[int] = []
        self.rounds: list[Round] = []
        self._stops = stops
        # Token i is chosen by number i, with a head or without: one seed gives one answer.
        self.generator = torch.Generator().manual_seed(sampling.seed * 1_000_003 + index)
        count = stops.max_new_tokens + ahead
        self.numbers = torch.rand(count, generator=self.generator, dtype=torch.float64)

    def extend(self, new: list[int]) -> bool:
        """Add a round's tokens up to where the answer ends, and say whether it does."""
        before = len(self.tokens)
        ended = self._stops.extend(self.tokens, new)
        self.latest = self.tokens[before:]
        return ended

    def generation(self, seconds: Seconds) -> Generation:
        return Generation(self.tokens, seconds, self.accepted, self.rounds)


def uniforms(answers: list[Answer], depths: Tensor) -> Tensor:
    """The numbers that choose the tokens after some nodes of each answer's tree.

    depths: [B, N]  0 is the answer's next token
    returns [B, N]  float64
    """
    places = torch.tensor([len(answer.tokens) for answer in answers], device=depths.device)
    numbers = torch.stack([answer.numbers for answer in answers]).to(depths.device)
    return numbers.gather(1, places[:, None] + depths)
