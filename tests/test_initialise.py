"""The start by regression: what a solver gives, whatever the order and the grouping."""

import pytest
import torch
from torch.testing import assert_close

from data.batches import pack
from data.config import TargetConfig
from data.targets.model import load_config, read_target_head
from train.config import INPUTS
from train.fit import initialise
from train.fit.initialise import RIDGE, regression_init
from train.head import DraftHead, draft_config


@pytest.fixture(scope="module")
def target_head(target_path):
    return read_target_head(TargetConfig(path=str(target_path)))


@pytest.fixture
def fit_fc(cache, target_path, target_head):
    """A head whose fc was fitted to `sequences` of the tiny cache."""

    def fit_fc(sequences, *, inputs="feature_token", seed=0) -> DraftHead:
        target = load_config(TargetConfig(path=str(target_path)))
        torch.manual_seed(0)
        head = DraftHead(draft_config(target, inputs=inputs))
        regression_init(head, target_head, cache, sequences, seed=seed)
        return head

    return fit_fc


@pytest.mark.parametrize("inputs", INPUTS)
def test_the_fit_is_the_solvers_least_squares(cache, target_head, fit_fc, inputs):
    sequences = list(range(len(cache)))
    head = fit_fc(sequences, inputs=inputs)

    batch = pack(cache, sequences)
    tokens = target_head.embed(batch.next_ids[batch.supervised]).double()
    features = batch.features[batch.supervised].double()
    x, y = head.fc_inputs(tokens, features), batch.target_features.double()
    ridge = RIDGE * x.square().sum(0).mean()  # of the mean diagonal of x^T x
    rows = torch.cat([x, ridge.sqrt() * torch.eye(x.shape[1], dtype=torch.float64)])
    wanted = torch.cat([y, torch.zeros(x.shape[1], y.shape[1], dtype=torch.float64)])
    solution = torch.linalg.lstsq(rows, wanted).solution
    assert_close(head.fc.weight.double(), solution.T, rtol=1e-5, atol=1e-6)
    assert not head.layer.self_attn.o_proj.weight.any()
    assert not head.layer.mlp.down_proj.weight.any()


def test_the_fit_does_not_depend_on_how_many_chats_a_product_takes(cache, fit_fc, monkeypatch):
    sequences = list(range(len(cache)))
    together = fit_fc(sequences).fc.weight
    monkeypatch.setattr(initialise, "PRODUCT_TOKENS", 1)
    assert_close(fit_fc(sequences).fc.weight, together, rtol=1e-5, atol=1e-6)


def test_the_fit_is_deterministic_and_draws_its_chats_from_the_whole_file(
    cache, fit_fc, monkeypatch
):
    """With room for a third of the pairs, two seeds take two samples, neither the first ones."""
    sequences = list(range(len(cache)))
    monkeypatch.setattr(initialise, "PRODUCT_TOKENS", 1)
    monkeypatch.setattr(initialise, "MAX_PAIRS", int(cache.num_supervised.sum()) // 3)
    one, again, other = (fit_fc(sequences, seed=seed).fc.weight for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.allclose(one, other, rtol=1e-3)
    first = fit_fc(sequences[: len(sequences) // 3]).fc.weight
    assert not torch.allclose(one, first, rtol=1e-3)
