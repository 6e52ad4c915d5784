"""Token sequences made by hand, and their figures."""

import torch

from data.chats.statistics import Statistics, measure
from data.chats.tokens import Tokens

END = 2  # the end-of-turn token of the hand-made sequences
Sequence = list[tuple[int, bool]]  # token and whether it is supervised


def tokens_of(sequences: list[Sequence]) -> Tokens:
    flat = [pair for sequence in sequences for pair in sequence]
    return Tokens(
        torch.tensor([token for token, _ in flat], dtype=torch.int32),
        torch.tensor([is_reply for _, is_reply in flat], dtype=torch.bool),
        torch.tensor([0, *map(len, sequences)]).cumsum(0),
    )


def figures(*parts: Tokens, max_length: int = 50) -> Statistics:
    return measure(parts, max_length=max_length, end_tokens={END}, spell=str)
