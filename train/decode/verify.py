"""Verifying: the target checks all drafted tokens in one forward."""

from collections.abc import Sequence

from torch import Tensor
from transformers import DynamicCache

from data.target import Target


class TargetStream:
    """The target at the end of one growing sequence."""

    def __init__(self, target: Target) -> None:
        self._backbone = target.model.get_decoder()
        # Without a config every layer keeps all its rows, also a sliding-window one (its mask
        # still cuts the window): rejected rows can be dropped at any length.
        self._cache = DynamicCache()

    def append(self, tokens: Tensor) -> Tensor:
        """Run the backbone over the next tokens of the sequence: [T] -> features [T, H]."""
        output = self._backbone(input_ids=tokens[None], past_key_values=self._cache, use_cache=True)
        return output.last_hidden_state[0]

    def drop(self, count: int) -> None:
        """Forget the newest `count` tokens."""
        if count:
            self._cache.crop(-count)


def count_accepted(drafted: Sequence[int], predicted: Sequence[int]) -> int:
    """How many drafted tokens the target would have chosen itself, up to the first miss.

    drafted:   d_1 ... d_K
    predicted: the target's argmax after x_L, d_1, ..., d_K (K+1 tokens); the one after the
               last accepted token is the bonus token
    """
    for count, (draft, prediction) in enumerate(zip(drafted, predicted, strict=False)):
        if draft != prediction:
            return count
    return len(drafted)
