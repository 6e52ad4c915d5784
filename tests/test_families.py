"""Features, output head and final norm of real tiny models of every family."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoConfig

from data.config import TargetConfig
from data.targets.families import FAMILIES as KNOWN_FAMILIES
from data.targets.model import Target, check_output_head, load_config
from data.targets.vllm_features import final_norm
from tests.targets import (
    FAMILIES,
    assert_same_head,
    family_config,
    load,
    randomise_norms,
    read,
    wrapped_config,
)
from tests.tiny import save_tiny_target


def assert_is_a_target(target: Target, folder: Path) -> None:
    """Head, features and final norm are the model's own; padding changes no feature."""
    input_ids = torch.randint(0, 259, (3, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = target.model(input_ids=input_ids).logits
    features = target.features(input_ids)
    assert_close(target.head.logits(features), theirs.float())
    check_output_head(target, input_ids)
    assert_same_head(read(folder), target)

    padded = torch.zeros(2, 40, dtype=torch.int64)
    padded[:, :24] = input_ids[1:]
    assert_close(target.features(padded)[:, :24], features[1:])

    config = TargetConfig(path=str(folder))
    norm = final_norm(config, load_config(config), torch.float32)
    states = 3 * torch.randn(5, 32)
    assert torch.equal(norm(states), target.model.get_decoder().norm(states))
    assert not torch.equal(norm(states), states)


def test_no_family_is_untested():
    assert FAMILIES.keys() == KNOWN_FAMILIES.keys()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_features_and_head_give_the_own_logits_of_every_family(model_type, tmp_path):
    target = load(randomise_norms(save_tiny_target(tmp_path, family_config(model_type))))
    assert_is_a_target(target, tmp_path)
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not list(read(tmp_path).parameters())


@pytest.mark.parametrize("model_type", ["gemma3", "mistral3"])
def test_the_text_part_of_an_image_text_model_is_a_target(model_type, tmp_path):
    target = load(randomise_norms(save_tiny_target(tmp_path, wrapped_config(model_type))))
    assert_is_a_target(target, tmp_path)
    assert len(target.fingerprint["weights"]) == 16


def test_an_unknown_family_is_refused_by_name(tmp_path):
    config = AutoConfig.for_model("gpt2", vocab_size=259, n_embd=8, n_layer=1, n_head=2)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is a gpt2 model.*Tested families: apertus, cohere, "):
        load(tmp_path)
