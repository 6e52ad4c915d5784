"""Sampled answers have the target's distribution, whatever is drafted."""

from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

import train.decode.verify
from data.config import TargetConfig
from data.targets.model import Target, load_target
from tests.decoding import DRAFTINGS
from tests.heads import random_prompts, trained_head
from tests.tiny import save_tiny_target, tiny_llama_config
from train.decode import (
    Drafting,
    Generation,
    Sampling,
    Typical,
    plain_generate,
    speculative_generate,
)
from train.decode.children import drawn
from train.decode.sampling import inverse_cdf
from train.decode.verify import matching, sibling
from train.head import DraftHead

VOCAB = 7
NEW = 3  # tokens of the answers that are counted
COUNT = 4000  # answers: enough for each wrong rule below to fail
BUSHY = [[0], [1], [2], [0, 0], [0, 1], [1, 0]]
WARPED = Sampling(temperature=0.8, top_p=0.85, top_k=5)
WAYS = {
    "chain, top": Drafting.chain(2),
    "static, top": Drafting.static(BUSHY),
    "dynamic, top": Drafting.dynamic(num_steps=2, topk=3, num_draft_tokens=8),
    "chain, sampled": Drafting.chain(2, children="sampled"),
    "static, sampled": Drafting.static(BUSHY, children="sampled"),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Target:
    """A target of seven tokens: all answers of three tokens can be counted."""
    config = tiny_llama_config(vocab_size=VOCAB, initializer_range=0.3)
    path = save_tiny_target(tmp_path_factory.mktemp("small"), config, seed=3)
    return load_target(TargetConfig(path=str(path), dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def head(small) -> DraftHead:
    """A head that knows a little: some of its guesses are accepted, of all ranks."""
    torch.manual_seed(0)
    prompts = [torch.randint(0, VOCAB, (length,)) for length in (3, 4, 5, 6)]
    return trained_head(small, prompts, steps=40)


PROMPT = torch.tensor([4, 5, 3])


def exact(target: Target, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The probability of every answer of NEW tokens, one forward after the other."""
    found = {}
    answers = list(product(range(VOCAB), repeat=NEW))
    ids = torch.tensor([[*PROMPT.tolist(), *answer] for answer in answers])
    logits = target.head.logits(target.features(ids[:, :-1])[:, len(PROMPT) - 1 :])
    probs = sampling.probabilities(logits)  # [answers, NEW, V]
    chosen = probs.gather(2, ids[:, len(PROMPT) :, None])[:, :, 0].prod(dim=1)
    for answer, probability in zip(answers, chosen.tolist(), strict=True):
        found[answer] = probability
    assert sum(found.values()) == pytest.approx(1)
    return found


def p_value(counts: Counter, probabilities: dict) -> float:
    """Of Pearson's chi-square; outcomes that are expected fewer than 8 times count as one."""
    total = sum(counts.values())
    assert all(probabilities[outcome] > 0 for outcome in counts)
    cells, rest = [], [0.0, 0.0]
    for outcome, probability in probabilities.items():
        cell = [counts[outcome], total * probability]
        if cell[1] >= 8:
            cells.append(cell)
        else:
            rest = [rest[0] + cell[0], rest[1] + cell[1]]
    cells += [rest] if rest[1] >= 8 else []
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2).double()))


def sample(
    target: Target, head: DraftHead, drafting: Drafting, sampling: Sampling, *, count: int
) -> tuple[Counter, list[Generation]]:
    generations = speculative_generate(
        target,
        head,
        [PROMPT] * count,
        drafting=drafting,
        sampling=sampling,
        max_new_tokens=NEW,
        stop_ids=(),
    )
    return Counter(tuple(generation.tokens) for generation in generations), generations


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0), WARPED], ids=["plain", "warped"])
@pytest.mark.parametrize("way", WAYS)
def test_samples_have_the_targets_distribution(small, head, way, sampling):
    counts, generations = sample(small, head, WAYS[way], sampling, count=COUNT)
    assert p_value(counts, exact(small, sampling)) > 1e-4
    accepted = [count for generation in generations for count in generation.accepted]
    assert 0.05 < sum(accepted) / len(accepted) < 1.99  # or nothing was tried


def test_plain_samples_have_the_targets_distribution(small):
    generations = plain_generate(
        small, [PROMPT] * COUNT, sampling=WARPED, max_new_tokens=NEW, stop_ids=()
    )
    counts = Counter(tuple(generation.tokens) for generation in generations)
    assert p_value(counts, exact(small, WARPED)) > 1e-4


# --- what a wrong rule would give ---------------------------------------------------------------


def without_residual(target_probs, draft_probs, tokens, generator):
    """Rejected: drawn from p again, not from what is left of it."""
    place, _ = sibling(target_probs, draft_probs, tokens, generator)
    return place, target_probs


def first_child_only(target_probs, draft_probs, tokens, generator):
    """The residual of the first child only: later ones are asked, then forgotten."""
    place, left = sibling(target_probs, draft_probs, tokens[:1], generator)
    if place is None and len(tokens) > 1:
        rest = draft_probs.clone()
        rest[tokens[0]] = 0
        later, _ = sibling(left, rest, tokens[1:], generator)
        return (None if later is None else later + 1), left
    return place, left


def with_replacement(target_probs, draft_probs, tokens, generator):
    """The head's distribution keeps the tokens that were drawn from it."""
    for place, token in enumerate(tokens):
        uniform = torch.rand((), generator=generator, dtype=torch.float64)
        if uniform * draft_probs[token] < target_probs[token]:
            return place, target_probs
        target_probs = (target_probs - draft_probs).clamp(min=0)
        target_probs = target_probs / target_probs.sum()
    return None, target_probs


def always_accepted(target_probs, draft_probs, tokens, generator):
    return (0, target_probs) if tokens else (None, target_probs)


def first_tokens(
    target_probs: Tensor, draft_probs: Tensor, rule: Callable, *, count: int, children: int
) -> Counter:
    """The token that a node with drawn children is followed by, many times. [V] and [V]"""
    generator = torch.Generator().manual_seed(0)
    choose = drawn(Sampling(temperature=1.0), [generator])
    logits = draft_probs.log().expand(1, count, -1)
    drafts = choose(logits, children).tokens[0].tolist()
    counts: Counter = Counter()
    for tokens in drafts:
        place, left = rule(target_probs, draft_probs, tokens, generator)
        if place is None:
            uniform = torch.rand((), generator=generator, dtype=torch.float64)
            counts[int(inverse_cdf(left, uniform))] += 1
        else:
            counts[tokens[place]] += 1
    return counts


NODE = (
    torch.tensor([0.10, 0.20, 0.30, 0.40]).double(),
    torch.tensor([0.55, 0.30, 0.10, 0.05]).double(),
)


def test_a_node_with_drawn_children_is_followed_by_the_targets_tokens():
    counts = first_tokens(*NODE, sibling, count=3000, children=3)
    assert p_value(counts, dict(enumerate(NODE[0].tolist()))) > 1e-4


@pytest.mark.parametrize(
    "rule",
    [without_residual, first_child_only, with_replacement, always_accepted],
)
def test_a_wrong_rule_shows_at_a_node(rule):
    counts = first_tokens(*NODE, rule, count=3000, children=3)
    assert p_value(counts, dict(enumerate(NODE[0].tolist()))) < 1e-5


@pytest.mark.parametrize(
    "rule", [without_residual, first_child_only, with_replacement, always_accepted]
)
def test_a_wrong_rule_shows_in_answers(small, head, monkeypatch, rule):
    """The chi-square test above is sharp enough to fail."""
    monkeypatch.setattr(train.decode.verify, "sibling", rule)
    counts, _ = sample(small, head, WAYS["static, sampled"], Sampling(temperature=1.0), count=COUNT)
    assert p_value(counts, exact(small, Sampling(temperature=1.0))) < 1e-5


def test_a_constant_bonus_token_shows_in_answers(small, head, monkeypatch):
    """Accepted by a sample, but always followed by the same token."""

    def constant_bonus(tree, predicted):
        verdict = matching(tree, predicted)
        return type(verdict)(verdict.ends, verdict.bonus * 0 + 4)

    monkeypatch.setattr("train.decode.rounds.matching", constant_bonus)
    counts, _ = sample(small, head, WAYS["dynamic, top"], Sampling(temperature=1.0), count=2000)
    assert p_value(counts, exact(small, Sampling(temperature=1.0))) < 1e-5


# --- the same samples as plain decoding ---------------------------------------------------------


@pytest.mark.parametrize("kind", DRAFTINGS)
def test_with_the_likeliest_children_one_seed_gives_the_answer_of_plain_decoding(small, head, kind):
    prompts = [ids % VOCAB for ids in random_prompts(small, [1, 4, 9, 3])]
    for sampling in (Sampling(temperature=1.0, seed=5), Sampling(temperature=0.7, top_p=0.9)):
        arguments = {"sampling": sampling, "max_new_tokens": 20, "stop_ids": {2}}
        batch = speculative_generate(small, head, prompts, drafting=DRAFTINGS[kind], **arguments)
        plain = plain_generate(small, prompts, **arguments)
        assert [g.tokens for g in batch] == [g.tokens for g in plain]
        alone = speculative_generate(small, head, prompts[0], drafting=DRAFTINGS[kind], **arguments)
        assert alone.tokens == plain[0].tokens
        assert sum(sum(g.accepted) for g in batch) > 0


def test_another_seed_gives_another_answer(small):
    answers = {
        tuple(
            plain_generate(
                small,
                PROMPT,
                sampling=Sampling(temperature=1.0, seed=seed),
                max_new_tokens=12,
                stop_ids=(),
            ).tokens
        )
        for seed in range(4)
    }
    assert len(answers) == 4


# --- what changes the distribution, and what is refused ---------------------------------------


def test_typical_acceptance_is_lossy_and_says_so(small, head):
    sampling = Sampling(temperature=1.0, typical=Typical())
    assert not sampling.lossless and WARPED.lossless
    counts, _ = sample(small, head, WAYS["dynamic, top"], sampling, count=2000)
    assert p_value(counts, exact(small, Sampling(temperature=1.0))) < 1e-5


def test_ways_that_do_not_go_together_are_refused(small, head):
    with pytest.raises(ValueError, match="temperature above 0"):
        Sampling(typical=Typical())
    with pytest.raises(ValueError, match="or a temperature"):
        sample(small, head, WAYS["chain, sampled"], Sampling(), count=1)
    with pytest.raises(ValueError, match="use children='top'"):
        lossy = Sampling(temperature=1.0, typical=Typical())
        sample(small, head, WAYS["chain, sampled"], lossy, count=1)
