import pytest
import torch

from data.config import TargetConfig
from data.target import load_target
from tests.tiny import save_tiny_target, tiny_llama_config
from train.decode import plain_generate
from train.differences import explain_difference

IDS = torch.tensor([5, 6, 7])


def test_a_difference_without_a_tie_is_called_so(tiny_target_and_head):
    target, _ = tiny_target_and_head
    plain = plain_generate(target, IDS, max_new_tokens=6, stop_ids=()).tokens
    other = [*plain[:4], (plain[4] + 1) % 259, plain[5]]
    found = explain_difference(target, IDS, plain, other)
    logits = target.head.logits(target.features(torch.cat([IDS, torch.tensor(plain[:4])])[None]))
    gap = float(logits[0, -1, plain[4]] - logits[0, -1, other[4]])
    assert found["position"] == 4 and not found["near_tie"]
    assert found["logit_gap"] == pytest.approx(gap, abs=1e-3)
    assert found["rounding"] < 1e-3
    drawn = explain_difference(target, IDS, plain, other, greedy=False)
    assert drawn["position"] == 4 and drawn["logit_gap"] is None and not drawn["near_tie"]


def test_two_tokens_with_the_same_logit_are_a_near_tie(tmp_path):
    path = save_tiny_target(tmp_path, tiny_llama_config(tie_word_embeddings=False))
    target = load_target(TargetConfig(path=str(path), device="cpu"))
    plain = plain_generate(target, IDS, max_new_tokens=3, stop_ids=()).tokens
    twin = (plain[2] + 1) % 259
    target.head.weight[twin] = target.head.weight[plain[2]]
    found = explain_difference(target, IDS, plain, [*plain[:2], twin])
    assert found["near_tie"] and found["logit_gap"] == 0


def test_an_answer_that_ends_early_differs_there(tiny_target_and_head):
    target, _ = tiny_target_and_head
    plain = plain_generate(target, IDS, max_new_tokens=3, stop_ids=()).tokens
    found = explain_difference(target, IDS, plain, plain[:2])
    assert found["position"] == 2 and found["logit_gap"] is None and not found["near_tie"]
    assert explain_difference(target, IDS, plain, plain) is None
