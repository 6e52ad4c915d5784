import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import pytest
import torch

from data.batches import PackedBatch
from data.cache.reader import CachedSequence, supervised_pairs
from data.targets.model import TargetHead
from tests.tiny import tiny_llama_config
from train import acceptance
from train.acceptance import (
    ChainCounts,
    HeldoutBatch,
    HeldoutEstimate,
    chain_acceptance,
    prepare_batch,
)
from train.config import INPUTS, HeldoutConfig, TrainConfig
from train.fit.loop import fit
from train.head import DraftHead, draft_config

V, H = 12, 32


def make_case(seed: int, lengths: Sequence[int] = (40, 23), inputs: str = "feature_token"):
    """Documents that mostly follow the target's argmax, and a head that often agrees."""
    torch.manual_seed(seed)
    weight = torch.randn(V, H)
    sequences = [make_sequence(weight, length) for length in lengths]
    head = DraftHead(draft_config(tiny_llama_config(vocab_size=V), inputs=inputs))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return head, TargetHead(weight, weight), sequences


def make_sequence(weight: torch.Tensor, length: int) -> CachedSequence:
    input_ids = torch.randint(0, V, (length,))
    features = weight[input_ids.roll(-1)] + 0.3 * torch.randn(length, H)
    flip = torch.rand(length) < 0.2  # sometimes the target would have said something else
    features[flip] = torch.randn(int(flip.sum()), H)
    loss_mask = torch.ones(length, dtype=torch.bool)
    loss_mask[:4] = loss_mask[length // 2 : length // 2 + 4] = False
    return CachedSequence(features, input_ids, loss_mask)


def prepared(sequences: Sequence[CachedSequence], target_head: TargetHead) -> HeldoutBatch:
    """All of them in one batch."""
    pairs = [supervised_pairs(s.loss_mask).nonzero().squeeze(1) for s in sequences]
    lengths = [len(s.input_ids) - 1 for s in sequences]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    packed = PackedBatch(
        sequences=list(range(len(sequences))),
        lengths=lengths,
        next_ids=torch.cat([s.input_ids[1:] for s in sequences]),
        features=torch.cat([s.features[:-1] for s in sequences]),
        supervised=torch.cat([p + o for p, o in zip(pairs, offsets[:-1], strict=True)]),
        target_features=torch.cat(
            [s.features[p + 1] for s, p in zip(sequences, pairs, strict=True)]
        ),
    )
    return prepare_batch(packed, [f"chat{i}" for i in range(len(sequences))], target_head)


def one_by_one(head, target_head, sequence, num_steps):
    """The same figures by drafting each chain alone, with no cache and no batching."""
    features, ids = sequence.features, sequence.input_ids
    supervised = supervised_pairs(sequence.loss_mask)
    counts, overlap = ChainCounts.zeros(num_steps), torch.zeros(num_steps, dtype=torch.float64)
    for start in supervised.nonzero().squeeze(1).tolist():
        chain_features = features[: start + 1]
        chain_ids = ids[1 : start + 2]
        for n in range(num_steps):
            out = head(target_head.embed(chain_ids), chain_features, [len(chain_ids)])[-1:]
            logits = target_head.logits(torch.cat([out, features[start + n + 1][None]]))
            (drafted, wanted), probs = logits.argmax(-1), logits.softmax(-1)
            counts.tried[n] += 1
            overlap[n] += sum(min(p, q) for p, q in probs.T.tolist())
            if drafted != wanted:
                break
            counts.accepted[n] += 1
            pair = start + n + 1
            if pair >= len(supervised) or not supervised[pair] or ids[pair + 1] != drafted:
                break
            chain_features = torch.cat([chain_features, out])
            chain_ids = torch.cat([chain_ids, drafted[None]])
    return counts, overlap


@torch.no_grad()
@pytest.mark.parametrize("inputs", INPUTS)
def test_all_positions_at_once_equal_one_by_one_drafting(inputs, monkeypatch):
    monkeypatch.setattr(acceptance, "SAMPLING_STRIDE", 1)
    followed = 0
    for seed in range(8):
        head, target_head, sequences = make_case(seed, inputs=inputs)
        batch = prepared(sequences, target_head)
        ours = chain_acceptance(head, target_head, [batch], num_steps=4)
        for i, sequence in enumerate(sequences):
            theirs, overlap = one_by_one(head, target_head, sequence, 4)
            assert torch.equal(ours.tried[i], theirs.tried)
            assert torch.equal(ours.accepted[i], theirs.accepted)
            assert torch.equal(ours.compared[i], theirs.tried)
            torch.testing.assert_close(ours.overlap[i], overlap, rtol=1e-5, atol=1e-5)
            followed += int(theirs.tried[1:].sum())
    assert followed > 10  # later steps were really compared


@torch.no_grad()
def test_sampling_is_compared_in_every_eighth_place(monkeypatch):
    """However many rows one product of the output head takes."""
    head, target_head, sequences = make_case(0, lengths=[160])
    batch = prepared(sequences, target_head)
    estimate = chain_acceptance(head, target_head, [batch], num_steps=3)
    assert torch.equal(estimate.compared, -(-estimate.tried // 8))
    _, overlap = one_by_one(head, target_head, sequences[0], 3)
    everywhere = overlap[0] / estimate.counts.tried[0]
    assert estimate.sampling_rates[0] == pytest.approx(float(everywhere), abs=0.1)
    monkeypatch.setattr(acceptance, "LOGIT_ELEMENTS", 17 * V)
    cut = chain_acceptance(head, target_head, [batch], num_steps=3)
    assert torch.equal(cut.accepted, estimate.accepted)
    torch.testing.assert_close(cut.overlap, estimate.overlap, rtol=1e-5, atol=1e-5)


def test_a_perfect_head_is_accepted_wherever_the_text_is_the_targets_own():
    """The head returns e(t), and the target's next feature is made so that it says the same."""
    _, target_head, _ = make_case(0)
    head = DraftHead(draft_config(tiny_llama_config(vocab_size=V)))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        head.fc.weight[:, :H] = torch.eye(H) * 5  # f̂_{j+1} = 5 e(t_{j+1})
    best = target_head.logits(target_head.weight * 5).argmax(-1)
    ids = [0]
    for _ in range(30):
        ids.append(int(best[ids[-1]]))
    input_ids = torch.tensor(ids)
    features = 5 * target_head.weight[input_ids]
    sequence = CachedSequence(features, input_ids, torch.ones(len(ids), dtype=torch.bool))
    batch = prepared([sequence], target_head)
    counts = chain_acceptance(head, target_head, [batch], num_steps=3).counts
    assert counts.rates == [1.0, 1.0, 1.0] and counts.length == 4.0


def test_acceptance_length_is_one_plus_the_sum_of_products():
    """10 rounds, of which 6 accepted draft token 1, 3 also token 2, none token 3."""
    counts = ChainCounts.of_rounds([0] * 4 + [1] * 3 + [2] * 3, num_steps=3)
    assert counts.accepted.tolist() == [6, 3, 0] and counts.tried.tolist() == [10, 6, 3]
    assert counts.rates == [0.6, 0.5, 0.0]
    assert counts.length == pytest.approx(1 + 0.6 + 0.6 * 0.5) == pytest.approx(1 + (6 + 3) / 10)


def test_a_chain_that_was_never_tried_has_rate_zero():
    counts = ChainCounts.of_rounds([], num_steps=2)
    assert counts.rates == [0.0, 0.0] and counts.length == 1.0


def test_unsupervised_positions_are_not_tried():
    head, target_head, (sequence, _) = make_case(3)
    nothing = replace(sequence, loss_mask=torch.zeros_like(sequence.loss_mask))
    batch = prepared([nothing], target_head)
    counts = chain_acceptance(head, target_head, [batch], num_steps=3).counts
    assert counts.tried.tolist() == [0, 0, 0]


def random_estimate(conversations: int, *, seed: int, spread: float = 0.15) -> HeldoutEstimate:
    """Counts of chats that differ: each has an α of its own, 0.4 on average, at all three steps."""
    torch.manual_seed(seed)
    alpha = 0.4 + spread * (2 * torch.rand(conversations, 1) - 1)
    tried, accepted = [torch.full((conversations, 1), 50.0)], []
    for _ in range(3):
        accepted.append(torch.binomial(tried[-1], alpha))
        tried.append(accepted[-1])
    counts = torch.cat(tried[:3], 1).long(), torch.cat(accepted, 1).long()
    names = [f"chat{i}_0" for i in range(conversations)]
    return HeldoutEstimate(names, *counts, counts[0], torch.zeros(conversations, 3).double())


def parts_of(estimate: HeldoutEstimate, change) -> list[torch.Tensor]:
    """`change` of each of the estimate's tensors."""
    tensors = (estimate.tried, estimate.accepted, estimate.compared, estimate.overlap)
    return [change(tensor) for tensor in tensors]


def test_the_interval_covers_the_true_length_about_as_often_as_it_says():
    """A chat with α of its own has length 1 + α + α² + α³; the true value is its mean."""
    alpha = torch.linspace(0.25, 0.55, 100001, dtype=torch.float64)
    true = float((1 + alpha + alpha**2 + alpha**3).mean())
    intervals = [random_estimate(40, seed=seed).interval for seed in range(200)]
    covered = sum(low <= true <= high for low, high in intervals)
    assert 0.89 * 200 <= covered <= 0.99 * 200


def test_the_parts_of_one_chat_are_drawn_together():
    estimate = random_estimate(12, seed=0)
    two = HeldoutEstimate(
        [f"chat{i // 2}_{i % 2}" for i in range(12)], *parts_of(estimate, lambda t: t)
    )
    merged = HeldoutEstimate(
        [f"chat{i}_0" for i in range(6)],
        *parts_of(two, lambda t: t.reshape(6, 2, 3).sum(1)),
    )
    assert two.interval == pytest.approx(merged.interval, abs=1e-12)
    assert two.interval != estimate.interval


def test_an_estimate_does_not_depend_on_who_counted_which_document():
    """Bit for bit, floating-point sums included."""
    whole = random_estimate(30, seed=1)
    whole.overlap.uniform_()
    for processes in (2, 3, 40):
        parts = []
        for rank in range(processes):
            share = itemgetter(slice(rank, None, processes))
            parts.append(HeldoutEstimate(share(whole.names), *parts_of(whole, share)))
        together = HeldoutEstimate.joined(parts)
        assert together.to_json() == HeldoutEstimate.joined([whole]).to_json()
        assert str(together) == str(whole)


def test_one_conversation_has_no_interval():
    alone = random_estimate(1, seed=0)
    assert alone.interval is None and str(alone) == f"{alone.length:.3f}"


def test_a_launch_estimates_what_one_process_does(cache_path, tmp_path):
    """Each of two processes has its own held-out documents; the record is of all of them."""
    config = TrainConfig(
        features=str(cache_path),
        out=str(tmp_path / "one"),
        max_steps=1,
        lr=1e-6,
        heldout=HeldoutConfig(share=0.3),
    )
    fit(config)
    root = Path(__file__).parent.parent
    launcher = ["accelerate.commands.launch", "--config_file", str(root / "conf/launch/ddp.yaml")]
    command = [sys.executable, "-m", *launcher, "-m", "scripts.train_head"]
    command += [f"features={cache_path}", f"out={tmp_path / 'two'}", "max_steps=1", "lr=1e-6"]
    command += ["heldout.share=0.3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True)

    one, two = (json.loads((tmp_path / name / "best.json").read_text()) for name in ("one", "two"))
    assert one["conversations"] > 2 and one["interval"][0] <= one["interval"][1]
    for key in ("tried", "accepted", "interval", "conversations"):
        assert one[key] == two[key], key
    assert one["sampling_alpha"] == pytest.approx(two["sampling_alpha"], rel=1e-5)
