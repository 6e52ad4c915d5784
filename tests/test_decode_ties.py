"""A difference between two greedy answers is explained in float64, or it is a fault."""

import pytest
import torch

from data.config import TargetConfig
from data.targets.model import load_target
from tests.targets import FAMILIES, family_config
from tests.tiny import save_tiny_target, tiny_llama_config
from train.decode import TargetStream, explain_difference, plain_generate, recheck
from train.decode.ties import in_float64

TEXT = [5, 6, 7, 8]


def loaded(path, **settings):
    return load_target(TargetConfig(path=str(path), device="cpu", **settings))


@pytest.fixture(scope="module")
def target(target_path):
    return loaded(target_path, dtype="float32")


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "gpt_oss", "granite"])
def test_the_recheck_is_in_float64_and_leaves_the_target_as_it_was(tmp_path, family):
    """Norms and rotations, too: in float32 they would leave an error of 1e-7."""
    assert family in FAMILIES
    save_tiny_target(tmp_path, family_config(family))
    target = loaded(tmp_path, dtype="float32")
    ids = torch.tensor([TEXT])
    before = target.head.logits(target.features(ids))
    found = recheck(target, TEXT[:2], TEXT[2:], 10, 20)
    assert torch.equal(target.head.logits(target.features(ids)), before)
    assert 0 < found.rounding < 1e-4
    gap = float((before[0, -1, 10] - before[0, -1, 20]).abs())
    assert found.logit_gap == pytest.approx(gap, abs=2 * found.rounding)


def test_rounding_is_that_of_the_targets_own_dtype(target, target_path):
    narrow = recheck(loaded(target_path, dtype="bfloat16"), TEXT[:2], TEXT[2:], 10, 20)
    assert narrow.rounding > 1000 * recheck(target, TEXT[:2], TEXT[2:], 10, 20).rounding


def test_a_float64_recheck_rounds_no_norm_to_float32(target):
    """The same text in two ways gives the same float64 logits to 1e-12, not to 1e-7."""

    def last(stream: TargetStream, ids: torch.Tensor) -> torch.Tensor:
        return target.head.logits(stream.append(ids)[0, -1])

    stepwise = TargetStream(target)
    with torch.inference_mode(), in_float64(target):
        at_once = last(TargetStream(target), torch.tensor([TEXT]))
        for token in TEXT:
            one_by_one = last(stepwise, torch.tensor([[token]]))
    assert at_once.dtype == torch.float64
    assert float((at_once - one_by_one).abs().max()) < 1e-12


def test_a_difference_without_a_tie_is_called_so(target):
    prompt = torch.tensor(TEXT)
    plain = plain_generate(target, prompt, max_new_tokens=6, stop_ids=()).tokens
    other = [*plain[:4], (plain[4] + 1) % 259, plain[5]]
    found = explain_difference(target, prompt, plain, other)
    assert found["position"] == 4 and not found["near_tie"]
    assert found["logit_gap"] > 1000 * found["rounding"]


def twins(tmp_path, token: int, twin: int):
    target = loaded(
        save_tiny_target(tmp_path, tiny_llama_config(tie_word_embeddings=False)), dtype="float32"
    )
    target.head.weight[twin] = target.head.weight[token]
    return target


def test_two_best_tokens_with_the_same_logit_are_a_near_tie(tmp_path):
    first = loaded(save_tiny_target(tmp_path, tiny_llama_config(tie_word_embeddings=False)))
    prompt = torch.tensor(TEXT)
    plain = plain_generate(first, prompt, max_new_tokens=3, stop_ids=()).tokens
    twin = (plain[2] + 1) % 259
    target = twins(tmp_path, plain[2], twin)
    found = explain_difference(target, prompt, plain, [*plain[:2], twin])
    assert found["near_tie"] and found["logit_gap"] == 0


def test_two_equal_tokens_that_are_not_the_best_are_no_near_tie(tmp_path):
    """Undecided between two bad tokens is no excuse for taking one of them."""
    target = twins(tmp_path, 10, 20)
    assert recheck(target, TEXT[:2], TEXT[2:], 10, 20).logit_gap == 0
    assert not recheck(target, TEXT[:2], TEXT[2:], 10, 20).near_tie


def test_an_answer_that_ends_early_differs_there(target):
    prompt = torch.tensor(TEXT)
    plain = plain_generate(target, prompt, max_new_tokens=3, stop_ids=()).tokens
    found = explain_difference(target, prompt, plain, plain[:2])
    assert found["position"] == 2 and found["logit_gap"] is None and not found["near_tie"]
    assert explain_difference(target, prompt, plain, plain) is None
