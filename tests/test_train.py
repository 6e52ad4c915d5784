import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import safetensors
import torch
from torch.testing import assert_close

from data.batches import add_noise, pack
from data.config import TargetConfig
from data.targets.model import load_config, read_target_head
from tests.training import assert_same_run, losses, small_run
from train.bench.plain import plain_loss
from train.config import HeadConfig, HeldoutConfig, LossConfig, TrainConfig
from train.fit.checkpoints import find_checkpoint, load_head
from train.fit.loop import fit
from train.fit.loss import distillation_loss
from train.fit.plan import learning_rate
from train.fit.step import NotFiniteError
from train.fit.vocabulary import reply_token_counts
from train.head import DraftHead, draft_config


@pytest.fixture
def config(cache_path, tmp_path) -> TrainConfig:
    return small_run(cache_path, tmp_path / "run")


def test_training_lowers_the_loss_and_keeps_the_target_frozen(config, target_path):
    files = {p: p.read_bytes() for p in target_path.iterdir()}
    length = fit(replace(config, max_steps=40, save_every=20))
    first, last = losses(config.out)[0], losses(config.out)[-1]
    assert last[1] < 0.9 * first[1] and last[2] < first[2]
    assert length >= 1.0
    assert all(p.read_bytes() == content for p, content in files.items())


def test_training_reads_two_matrices_of_the_target_and_no_more(config, target_path, monkeypatch):
    """The tiny target ties them: one is read, of a file that holds its layers as well."""
    whole, opened = [], safetensors.safe_open

    class Recording:
        def __init__(self, *arguments, **options) -> None:
            self.file = opened(*arguments, **options)

        def __enter__(self):
            return self

        def __exit__(self, *error) -> None:
            pass

        def __getattr__(self, name: str):
            return getattr(self.file, name)

        def get_tensor(self, name: str) -> torch.Tensor:
            whole.append(name)
            return self.file.get_tensor(name)

    with safetensors.safe_open(target_path / "model.safetensors", framework="pt") as f:
        assert len(list(f.keys())) > 10
    monkeypatch.setattr(safetensors, "safe_open", Recording)
    fit(replace(config, max_steps=1))
    assert set(whole) == {"model.embed_tokens.weight"}


def test_the_update_does_not_depend_on_accumulation(config, tmp_path):
    fit(config)
    cut = replace(config, out=str(tmp_path / "cut"), micro_batch_tokens=250)
    fit(cut)
    assert_same_run(config.out, cut.out)


def test_the_update_does_not_depend_on_the_chunks_of_the_loss(config, tmp_path):
    fit(config)
    cut = replace(config, out=str(tmp_path / "cut"), loss=LossConfig(chunk_rows=7))
    fit(cut)
    assert_same_run(config.out, cut.out)


def test_the_learning_rate_ends_with_the_run():
    config = TrainConfig(features="", out="", lr=1.0, warmup=0.1)
    rates = [learning_rate(step, 100, config) for step in range(1, 101)]
    assert max(rates) == 1.0 == rates[9]
    assert rates[0] == pytest.approx(0.1)
    assert 0 < rates[-1] < 1e-3
    assert all(later < earlier for earlier, later in pairwise(rates[9:]))


def test_a_non_finite_loss_stops_before_the_update_and_names_the_conversations(config):
    with pytest.raises(RuntimeError, match=r"step \d+ is not finite.*nonfinite.json"):
        fit(replace(config, lr=1e30, max_grad_norm=1e30, warmup=0.0, max_steps=50))
    record = json.loads((Path(config.out) / "nonfinite.json").read_text())
    assert record["conversations"]


def test_a_gradient_that_is_not_finite_stops_before_the_update(config):
    """The loss is below 1e38, but the squares in the gradient's norm are not."""
    with pytest.raises(NotFiniteError, match=r"gradient of step 1 is not finite.*nonfinite.json"):
        fit(replace(config, loss=LossConfig(l1_weight=1e30)))


def test_a_start_by_regression_predicts_before_any_training(config, cache, tmp_path):
    slow = replace(config, lr=1e-9, max_steps=1, save_every=1)
    fit(slow)
    fitted = replace(slow, out=str(tmp_path / "fitted"), head=HeadConfig(init="regression"))
    fit(fitted)
    assert losses(fitted.out)[0][1] < 0.7 * losses(slow.out)[0][1]
    assert all(math.isfinite(v) for v in losses(fitted.out)[0])


@pytest.mark.parametrize("sequences", [[0], [3, 0, 5, 9]])
def test_packed_training_equals_padded_training_in_loss_and_gradient(cache, target_path, sequences):
    """train/bench/plain.py pads, masks and holds all logits; sum and gradient are the same."""
    target = TargetConfig(path=str(target_path))
    target_head = read_target_head(target).double()
    torch.manual_seed(0)
    head = DraftHead(draft_config(load_config(target))).double()
    batch = pack(cache, sequences)
    noisy = add_noise(batch, kind="paper", width=0.1, seed=0, epoch=0).double()
    weights = {"l1_weight": 1.0, "ce_weight": 0.1}

    predicted = head(target_head.embed(batch.next_ids), noisy, batch.lengths)
    ours = distillation_loss(
        predicted[batch.supervised], batch.target_features, target_head, **weights
    ).loss
    ours_gradient = torch.autograd.grad(ours, list(head.parameters()))
    plain = plain_loss(head, target_head, batch, noisy, **weights)
    plain_gradient = torch.autograd.grad(plain, list(head.parameters()))

    assert_close(ours, plain, rtol=1e-9, atol=1e-9)
    for a, b in zip(ours_gradient, plain_gradient, strict=True):
        assert_close(a, b, rtol=1e-6, atol=1e-9)


def test_a_reduced_loss_vocabulary_is_the_most_frequent_reply_tokens(config, cache, caplog):
    """The tiny chats use few of the byte tokens: 60 entries cover them all, 5 do not."""
    caplog.set_level("INFO", logger="train")
    fit(replace(config, loss=LossConfig(vocab=60)))
    assert "60 of 259 vocabulary entries, which are 100.00 %" in caplog.text
    sequences = list(range(len(cache)))
    counts = reply_token_counts(cache, sequences, vocab_size=259)
    replies = sum(int(cache.sequence(i).loss_mask.sum()) for i in sequences)
    assert int(counts.sum()) == replies
    assert 0 < int((counts > 0).sum()) < 60


def test_a_split_that_holds_nothing_out_is_refused(config):
    with pytest.raises(ValueError, match=r"heldout\.share=1e-09 holds none of the \d+ sequences"):
        fit(replace(config, heldout=HeldoutConfig(share=1e-9)))


def test_without_held_out_conversations_the_newest_checkpoint_counts(config):
    fit(replace(config, heldout=HeldoutConfig(share=0.0)))
    assert find_checkpoint(Path(config.out)).name == "000008"
    assert not (Path(config.out) / "best.json").exists()
    _, record = load_head(find_checkpoint(Path(config.out)))
    assert record["acceptance"] is None  # not a τ of 1 that nobody measured
