"""The formula for the acceptance length, 1 + Σ_n Π_{i≤n} α_i, against rounds that are played."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import torch

from train.decode.tree import Tree
from train.decode.verify import matching


def expected_length(alphas: Sequence[float]) -> float:
    """τ of a chain whose draft token n is accepted with probability α_n if those before were."""
    return 1 + sum(accumulate(alphas, mul))


def simulated_length(alphas: Sequence[float], *, rounds: int, seed: int = 0) -> float:
    """Mean tokens of a round: chains of token 1, which the target chooses as often as α_n says."""
    steps = len(alphas)
    depths = torch.arange(steps + 1).expand(rounds, -1)
    tree = Tree(
        tokens=torch.ones(rounds, steps + 1, dtype=torch.long),
        parents=(depths - 1).clamp(min=0),
        depths=depths,
        ranks=torch.zeros_like(depths),
        confidences=torch.ones(rounds, steps + 1),
        num_steps=steps,
    )
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(rounds, steps + 1, generator=generator, dtype=torch.float64)
    chosen = uniforms < torch.tensor([*alphas, 0.0], dtype=torch.float64)
    accepted = matching(tree, chosen.long()).ends
    return 1 + float(accepted.double().mean())
