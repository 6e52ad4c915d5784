import json

import pytest
import torch

from data.config import TargetConfig
from data.targets.model import load_target
from tests.heads import random_prompts
from tests.tiny import save_tiny_target, tiny_llama_config
from train.config import EvaluateConfig
from train.decode import plain_generate, stop_ids_of
from train.measure.baselines import load_baselines

NEW = 16


def config(target_path, **changes) -> EvaluateConfig:
    values = dict(
        prompts="none",
        head="none",
        target=TargetConfig(path=str(target_path)),
        max_new_tokens=NEW,
        baselines=["prompt_lookup"],
    )
    return EvaluateConfig(**{**values, **changes})


def test_both_answer_as_plain_decoding_does(tiny_target_and_head, target_path, tmp_path):
    target, _ = tiny_target_and_head
    small = save_tiny_target(tmp_path, tiny_llama_config(num_hidden_layers=1), seed=5)
    baselines = load_baselines(
        config(target_path, baselines=["prompt_lookup", "assistant"], assistant=str(small)), target
    )
    assert list(baselines) == ["prompt_lookup", "assistant"]
    for ids in random_prompts(target, [6, 11]):
        plain = plain_generate(target, ids, max_new_tokens=NEW, stop_ids=stop_ids_of(target))
        for answer in baselines.values():
            found = answer(ids)
            assert found["tokens"] == plain.tokens
            assert found["seconds"]["total"] > 0


def test_forwards_of_the_target_are_counted(tiny_target_and_head, target_path):
    """The target as its own assistant: every draft is accepted, so few forwards are needed."""
    target, _ = tiny_target_and_head
    ids = random_prompts(target, [6])[0]
    itself = config(target_path, baselines=["assistant"], assistant=str(target_path))
    found = load_baselines(itself, target)["assistant"](ids)
    assert len(found["tokens"]) == NEW
    assert 1 <= found["forwards"] <= NEW / 2


def test_a_repetition_is_looked_up(tiny_target_and_head, target_path):
    target, _ = tiny_target_and_head
    start = random_prompts(target, [6])[0]
    said = plain_generate(target, start, max_new_tokens=24, stop_ids=()).tokens
    ids = torch.cat([start, torch.tensor(said), start])
    found = load_baselines(config(target_path, max_new_tokens=24), target)["prompt_lookup"](ids)
    assert found["forwards"] <= len(found["tokens"])


def test_the_targets_own_penalties_do_not_count(tmp_path):
    path = save_tiny_target(tmp_path)
    file = path / "generation_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"repetition_penalty": 5.0, "do_sample": True}))
    target = load_target(TargetConfig(path=str(path), device="cpu"))
    ids = random_prompts(target, [6])[0]
    plain = plain_generate(target, ids, max_new_tokens=NEW, stop_ids=stop_ids_of(target))
    assert load_baselines(config(path), target)["prompt_lookup"](ids)["tokens"] == plain.tokens


def test_an_assistant_of_another_vocabulary_is_refused(tiny_target_and_head, target_path, tmp_path):
    target, _ = tiny_target_and_head
    other = save_tiny_target(tmp_path)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["!"], vocab['"'] = vocab['"'], vocab["!"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=r"another vocabulary .* smaller model of the same family"):
        load_baselines(config(target_path, baselines=["assistant"], assistant=str(other)), target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"baselines": ["medusa"]}, "baselines is 'medusa', expected one of prompt_lookup"),
        ({"baselines": ["assistant"]}, r"Give both baselines=\[assistant\] and assistant=MODEL"),
        ({"assistant": "a"}, r"Give both baselines=\[assistant\] and assistant=MODEL"),
        ({"temperature": 1.0}, "measured greedily"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(target_path, changes, message):
    with pytest.raises(ValueError, match=message):
        config(target_path, **changes)
