"""Distributions to sample from, and what verification accepts of a few nodes, by hand."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from train.decode import Sampling, Typical
from train.decode.children import drawn
from train.decode.sampling import inverse_cdf
from train.decode.tree import Tree
from train.decode.verify import recursive_rejection, sibling, typical

# --- the distributions --------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [0, 1, 6])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_probabilities_are_those_of_transformers(temperature, top_p, top_k):
    logits = torch.randn(20, 40, generator=torch.Generator().manual_seed(0)) * 2
    theirs = TemperatureLogitsWarper(temperature)(None, logits.double())
    if top_k:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    theirs = TopPLogitsWarper(top_p)(None, theirs)
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    assert_close(sampling.probabilities(logits), theirs.softmax(-1))


def test_temperature_zero_is_the_likeliest_token():
    logits = torch.randn(5, 30)
    probs = Sampling().probabilities(logits)
    assert torch.equal(probs.argmax(-1), logits.argmax(-1)) and probs.max() == 1
    assert torch.equal(Sampling().choose(logits, torch.rand(5)), logits.argmax(-1))


def test_no_token_of_probability_zero_is_chosen():
    probs = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0]).double()
    uniforms = torch.tensor([0.0, 0.4999, 0.5, 1 - 2**-53]).double()
    assert inverse_cdf(probs.expand(4, -1), uniforms).tolist() == [1, 1, 3, 3]


# --- what is accepted ---------------------------------------------------------------------------


def chain(draft_probs: Tensor, tokens: Tensor) -> Tree:
    """[B, K, V] and [B, K], behind a root."""
    batch, steps = tokens.shape
    depths = torch.arange(steps + 1).expand(batch, -1)
    return Tree(
        tokens=torch.cat([torch.zeros(batch, 1, dtype=torch.long), tokens], dim=1),
        parents=(depths - 1).clamp(min=0),
        depths=depths,
        ranks=torch.zeros_like(depths),
        confidences=torch.ones(batch, steps + 1),
        num_steps=steps,
        draft_probs=draft_probs,
        inner=tuple(range(steps)),
    )


def drawn_chain(draft_probs: Tensor, generators: list[torch.Generator]) -> Tree:
    tokens = drawn(Sampling(temperature=1.0), generators)(draft_probs.log(), 1).tokens[:, :, 0]
    return chain(draft_probs, tokens)


def test_a_head_that_is_the_target_is_accepted_whole():
    generators = [torch.Generator().manual_seed(seed) for seed in range(200)]
    probs = torch.rand(200, 5, 11, dtype=torch.float64).softmax(-1)
    verdict = recursive_rejection(drawn_chain(probs[:, :4], generators), probs, generators)
    assert verdict.ends.tolist() == [4] * 200


def test_a_head_that_guesses_the_impossible_is_never_accepted():
    generators = [torch.Generator().manual_seed(seed) for seed in range(200)]
    probs = torch.rand(200, 5, 10, dtype=torch.float64)
    target_probs, draft_probs = probs.clone(), probs[:, :4].clone()
    target_probs[..., :5], draft_probs[..., 5:] = 0, 0
    target_probs /= target_probs.sum(-1, keepdim=True)
    draft_probs /= draft_probs.sum(-1, keepdim=True)
    verdict = recursive_rejection(drawn_chain(draft_probs, generators), target_probs, generators)
    assert verdict.ends.tolist() == [0] * 200
    assert verdict.bonus.min() >= 5


def test_a_child_that_could_not_be_drawn_is_no_child():
    """Of two possible tokens a third child is none, and must neither count nor divide by zero."""
    target_probs = torch.tensor([0.0, 0.0, 0.9, 0.1]).double()
    draft_probs = torch.tensor([0.6, 0.4, 0.0, 0.0]).double()
    for seed in range(20):
        place, left = sibling(
            target_probs, draft_probs, [0, 1, 2], torch.Generator().manual_seed(seed)
        )
        assert place is None
        assert_close(left, target_probs)


def test_typical_acceptance_is_medusas_rule():
    """p(x) > min(epsilon, delta exp(-H)): by hand, at two nodes."""
    target_probs = torch.zeros(1, 3, 4, dtype=torch.float64)
    target_probs[0, 0] = torch.tensor([0.7, 0.2, 0.06, 0.04])
    target_probs[0, 1] = target_probs[0, 2] = torch.tensor([0.25, 0.25, 0.25, 0.25])
    entropy = -sum(p * torch.log(torch.tensor(p)) for p in (0.7, 0.2, 0.06, 0.04))
    uniforms = torch.zeros(1, 3)

    def end(first: int, second: int, rule: Typical) -> int:
        tree = chain(target_probs[:, :2], torch.tensor([[first, second]]))
        return int(typical(tree, target_probs, uniforms, rule).ends)

    assert 0.06 < float(0.2 * torch.exp(-entropy)) < 0.2
    rule = Typical(epsilon=1.0, delta=0.2)
    assert end(0, 3, rule) == 2 and end(1, 3, rule) == 2
    assert end(2, 3, rule) == 0  # below the threshold, and what follows does not count
    assert end(2, 3, Typical(epsilon=0.05, delta=0.2)) == 2
    assert end(3, 3, Typical(epsilon=0.05, delta=0.2)) == 0


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": -1}]
)
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match="expected temperature >= 0"):
        Sampling(**wrong)
