"""Training on the head's own features: the chains are exactly those that drafting follows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from tests.tiny import tiny_llama_config
from train.config import HeldoutConfig, TrainConfig
from train.fit.loop import fit
from train.fit.unroll import chain_rows
from train.head import DraftHead, draft_config

H = 32
LENGTHS = [9, 1, 6]
# Two replies in the first document, and pairs that touch the edge between two documents.
SUPERVISED = torch.tensor([1, 2, 3, 6, 7, 8, 9, 10, 11, 12, 14])


@pytest.fixture
def head():
    torch.manual_seed(0)
    return DraftHead(draft_config(tiny_llama_config())).double().eval()


def pairs():
    torch.manual_seed(1)
    return torch.randn(sum(LENGTHS), H).double(), torch.randn(sum(LENGTHS), H).double()


def one_by_one(head, embeddings, features, num_steps):
    """Every chain alone, each step over all that is before it: what a drafter computes.

    returns  {(step, chain): feature} of the steps that stay in their document
    """
    found, begin = {}, 0
    for length in LENGTHS:
        e, f = embeddings[begin : begin + length], features[begin : begin + length]
        for chain, start in enumerate(SUPERVISED.tolist()):
            if not begin <= start < begin + length:
                continue
            place = start - begin
            seen = f[: place + 1]
            for step in range(min(num_steps, length - place)):
                out = head(e[: place + 1 + step], seen, [place + 1 + step])[-1]
                found[step, chain] = out
                seen = torch.cat([seen, out.detach()[None]])
        begin += length
    return found


def test_every_chain_equals_drafting_it_alone_in_value_and_gradient(head):
    embeddings, features = pairs()
    ours = head(embeddings, features, LENGTHS, SUPERVISED, 4)
    theirs = one_by_one(head, embeddings, features, 4)
    weights = torch.randn(ours.shape, dtype=torch.float64)
    for (step, chain), feature in theirs.items():
        assert_close(ours[step, chain], feature, rtol=1e-10, atol=1e-10)

    where = tuple(torch.tensor(list(theirs)).T)
    ours_gradient = torch.autograd.grad((ours * weights)[where].sum(), list(head.parameters()))
    total = sum((feature * weights[place]).sum() for place, feature in theirs.items())
    for a, b in zip(
        ours_gradient, torch.autograd.grad(total, list(head.parameters())), strict=True
    ):
        assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_step_one_is_the_ordinary_forward(head):
    embeddings, features = pairs()
    ours = head(embeddings, features, LENGTHS, SUPERVISED, 3)
    assert_close(ours[0], head(embeddings, features, LENGTHS)[SUPERVISED], rtol=0, atol=1e-12)


def test_a_chain_sees_only_what_drafting_would_see(head):
    """Step n of chain s reads the features of pairs 0 ... s and the tokens of pairs 0 ... s+n-1."""
    embeddings, features = pairs()
    ends = torch.tensor(LENGTHS).cumsum(0)
    before = head(embeddings, features, LENGTHS, SUPERVISED, 3)
    for pair in range(sum(LENGTHS)):
        other_features, other_embeddings = features.clone(), embeddings.clone()
        other_features[pair] += 1.0
        other_embeddings[pair] += 1.0
        by_feature = head(embeddings, other_features, LENGTHS, SUPERVISED, 3)
        by_token = head(other_embeddings, features, LENGTHS, SUPERVISED, 3)
        for chain, start in enumerate(SUPERVISED.tolist()):
            together = torch.searchsorted(ends, torch.tensor([pair, start]), right=True).unique()
            for step in range(3):
                if start + step >= ends[torch.searchsorted(ends, start, right=True)]:
                    continue  # past the end of the document: never counted
                same_document = len(together) == 1
                for after, seen in (
                    (by_feature, same_document and pair <= start),
                    (by_token, same_document and pair <= start + step),
                ):
                    changed = not torch.equal(after[step, chain], before[step, chain])
                    assert changed == seen, (pair, start, step)


def test_chains_count_until_they_leave_their_reply():
    rows = chain_rows(SUPERVISED, LENGTHS, num_steps=4)
    starts = [SUPERVISED[chains].tolist() for chains in rows]
    assert starts == [SUPERVISED.tolist(), [1, 2, 6, 7, 10, 11], [1, 6, 10], []]
    for n, chains in enumerate(rows):  # the target of chain m at step n+1 is that of pair m + n
        assert torch.equal(SUPERVISED[chains + n], SUPERVISED[chains] + n)


def test_a_batch_without_pairs_has_no_chains(head):
    nothing = torch.zeros(0, H, dtype=torch.float64)
    none = torch.zeros(0, dtype=torch.long)
    assert head(nothing, nothing, [0], none, 3).shape == (3, 0, H)
    assert [len(chains) for chains in chain_rows(none, [0], num_steps=3)] == [0, 0, 0]


@pytest.fixture
def config(cache_path, tmp_path) -> TrainConfig:
    return TrainConfig(
        features=str(cache_path),
        out=str(tmp_path / "run"),
        max_steps=4,
        batch_tokens=1000,
        micro_batch_tokens=1000,
        lr=3e-3,
        save_every=4,
        heldout=HeldoutConfig(share=0.2),
        unroll=3,
    )


def weights(config: TrainConfig) -> dict[str, torch.Tensor]:
    return load_file(Path(config.out) / "steps" / "000004" / "head.safetensors")


def test_the_unrolled_update_does_not_depend_on_how_the_step_was_cut(config, tmp_path):
    fit(config)
    cut = replace(config, out=str(tmp_path / "cut"), micro_batch_tokens=120)
    fit(cut)
    for name, tensor in weights(config).items():
        assert_close(tensor, weights(cut)[name], rtol=1e-3, atol=2e-5, msg=name)


def test_the_figures_of_a_run_are_those_of_step_one_whatever_the_unroll(config, tmp_path):
    """The first update's are equal: both runs still have the same weights."""
    fit(config)
    plain = replace(config, out=str(tmp_path / "plain"), unroll=1)
    fit(plain)
    rows = [
        [json.loads(line) for line in (Path(c.out) / "metrics.jsonl").read_text().splitlines()]
        for c in (config, plain)
    ]
    for name in ("smooth_l1", "cross_entropy", "agreement"):
        assert rows[0][0][name] == pytest.approx(rows[1][0][name], rel=1e-5)
    assert rows[0][0]["grad_norm"] != pytest.approx(rows[1][0]["grad_norm"], rel=1e-3)


def test_an_unroll_of_no_step_is_refused():
    with pytest.raises(ValueError, match="unroll is 0, but must be at least 1"):
        TrainConfig(features="", out="", unroll=0)
