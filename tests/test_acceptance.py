import pytest
import torch

from data.cache import CachedSequence, supervised_pairs
from data.target import TargetHead
from tests.tiny import tiny_llama_config
from train.acceptance import ChainCounts, chain_acceptance, prepare_document
from train.head import DraftHead, draft_config

V, H = 12, 32
CPU = torch.device("cpu")


def make_case(seed: int, length: int = 40):
    """A document whose text mostly follows the target's argmax, and a head that often agrees."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    weight = torch.randn(V, H)
    target_head = TargetHead(weight, weight)
    input_ids = torch.randint(0, V, (length,), generator=generator)
    features = weight[input_ids.roll(-1)] + 0.3 * torch.randn(length, H)
    flip = torch.rand(length) < 0.2  # sometimes the target would have said something else
    features[flip] = torch.randn(int(flip.sum()), H)
    loss_mask = torch.ones(length, dtype=torch.bool)
    loss_mask[:4] = loss_mask[20:24] = False
    config = draft_config(tiny_llama_config(vocab_size=V))
    head = DraftHead(config)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return head, target_head, CachedSequence(features, input_ids, loss_mask)


def one_by_one(head, target_head, sequence, num_steps):
    """The same counts by drafting each chain alone, with no cache and no batching."""
    features, ids = sequence.features, sequence.input_ids
    supervised = supervised_pairs(sequence.loss_mask)
    counts = ChainCounts.zeros(num_steps)
    for start in supervised.nonzero().squeeze(1).tolist():
        chain_features = features[: start + 1]
        chain_ids = ids[1 : start + 2]
        for n in range(num_steps):
            out = head(target_head.embed(chain_ids), chain_features, [len(chain_ids)])[-1:]
            drafted = target_head.logits(out).argmax(-1)
            wanted = target_head.logits(features[start + n + 1]).argmax(-1)
            counts.tried[n] += 1
            if drafted != wanted:
                break
            counts.accepted[n] += 1
            pair = start + n + 1
            if pair >= len(supervised) or not supervised[pair] or ids[pair + 1] != drafted:
                break
            chain_features = torch.cat([chain_features, out])
            chain_ids = torch.cat([chain_ids, drafted])
    return counts


@torch.no_grad()
def test_all_positions_at_once_equal_one_by_one_drafting():
    followed = 0
    for seed in range(8):
        head, target_head, sequence = make_case(seed)
        document = prepare_document(sequence, target_head, CPU)
        ours = chain_acceptance(head, target_head, [document], num_steps=4)
        theirs = one_by_one(head, target_head, sequence, 4)
        assert torch.equal(ours.tried, theirs.tried)
        assert torch.equal(ours.accepted, theirs.accepted)
        followed += int(ours.tried[1:].sum())
    assert followed > 10  # later steps were really compared


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
    document = prepare_document(sequence, target_head, CPU)
    counts = chain_acceptance(head, target_head, [document], num_steps=3)
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
    head, target_head, sequence = make_case(3)
    nothing = CachedSequence(
        sequence.features, sequence.input_ids, torch.zeros_like(sequence.loss_mask)
    )
    document = prepare_document(nothing, target_head, CPU)
    assert chain_acceptance(head, target_head, [document], num_steps=3).tried.tolist() == [0, 0, 0]
