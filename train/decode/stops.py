"""Where an answer ends: at a stop token, at a stop string, or at its longest length."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from data.targets.model import Target


def stop_ids_of(target: Target) -> frozenset[int]:
    """The tokens that end a reply: the tokenizer's and the generation config's, as in vLLM."""
    ids = {target.tokenizer.eos_token_id}
    generation_config = getattr(target.model, "generation_config", None)
    eos = getattr(generation_config, "eos_token_id", None)
    ids.update(eos if isinstance(eos, list) else [eos])
    return frozenset(ids - {None})


@dataclass(frozen=True, kw_only=True)
class Stops:
    """The rule that ends an answer, looked at after each single token, as plain decoding does."""

    max_new_tokens: int
    ids: Collection[int]
    strings: Sequence[str] = ()
    tokenizer: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}, but must be at least 1.")
        if isinstance(self.strings, str) or not all(self.strings):
            raise ValueError(
                f"stop_strings is {self.strings!r}, expected a list of strings that are not empty."
            )

    def extend(self, tokens: list[int], new: Sequence[int]) -> bool:
        """Append `new` up to where the answer ends, and say whether it does."""
        for token in new:
            tokens.append(token)
            if token in self.ids or len(tokens) >= self.max_new_tokens or self._spelled(tokens):
                return True
        return False

    def _spelled(self, tokens: list[int]) -> bool:
        """Whether the answer so far contains a stop string, which may begin inside a token."""
        if not self.strings:
            return False
        text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return any(string in text for string in self.strings)
