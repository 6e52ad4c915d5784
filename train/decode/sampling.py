"""Temperature, top-k and top-p, and how a token is chosen from what is left."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Typical:
    """Medusa's typical acceptance (arXiv 2401.10774, section 2.3.1). LOSSY: answers change.

    A drafted token x is accepted if p(x) > min(epsilon, delta · exp(-H(p))): plausible is enough,
    so answers do not have the target's distribution.
    """

    epsilon: float = 0.09
    delta: float = 0.3


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the target's tokens are chosen. Raises ValueError for what is no such setting."""

    temperature: float = 0.0  # 0: the likeliest token
    top_p: float = 1.0  # only the likeliest tokens that make up this probability
    top_k: int = 0  # only this many likeliest tokens; 0: all
    seed: int = 0  # prompt i of a batch draws from stream (seed, i)
    typical: Typical | None = None  # LOSSY acceptance; needs a temperature

    @property
    def lossless(self) -> bool:
        """Whether answers have exactly the distribution of plain decoding."""
        return self.typical is None

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(
                f"temperature is {self.temperature}, top_p {self.top_p} and top_k {self.top_k}; "
                "expected temperature >= 0, 0 < top_p <= 1 and top_k >= 0."
            )
        if self.typical and self.temperature == 0:
            raise ValueError("Typical acceptance is for sampling: give a temperature above 0.")

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution to sample from: [..., V] -> [..., V] float64.

        Temperature first, then top-k, then top-p, as serving engines do. With temperature 0 all
        probability is on the likeliest token.
        """
        if self.temperature == 0:
            best = logits.argmax(dim=-1, keepdim=True)
            return torch.zeros_like(logits, dtype=torch.float64).scatter_(-1, best, 1.0)
        logits = logits.double() / self.temperature
        if self.top_k:
            least = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        probs = logits.softmax(dim=-1)
        if self.top_p < 1:
            sorted_probs, order = probs.sort(dim=-1, descending=True, stable=True)
            # A token stays if the likelier ones together do not reach top_p yet.
            before = sorted_probs.cumsum(dim=-1) - sorted_probs
            kept = sorted_probs.masked_fill(before >= self.top_p, 0.0)
            probs = torch.zeros_like(probs).scatter_(-1, order, kept)
            probs = probs / probs.sum(dim=-1, keepdim=True)
        return probs

    def choose(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """The next token, by the inverse of the cumulative distribution.

        logits:   [..., V]
        uniforms: [...]     in [0, 1); the same number always gives the same token
        returns   [...]     token ids
        """
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        return inverse_cdf(self.probabilities(logits), uniforms)


GREEDY = Sampling()


def inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The token at which the cumulative distribution passes the uniform number.

    probs:    [..., V]  need not sum to one
    uniforms: [...]     in [0, 1)
    returns   [...]
    """
    cumulative = probs.double().cumsum(dim=-1)
    total = cumulative[..., -1:]
    # right=True: never a token of probability 0, also for the uniform number 0.
    found = torch.searchsorted(cumulative, uniforms[..., None] * total, right=True)
    # A number just below one times the total may be rounded to the total: then it is the last
    # token of any probability.
    return torch.minimum(found, torch.searchsorted(cumulative, total.contiguous()))[..., 0]
