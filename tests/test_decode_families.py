"""Targets of every family are decoded exactly, beyond their sliding windows, too."""

import pytest
import torch
from torch import Tensor

from data.config import TargetConfig
from data.targets.model import Target, load_target
from tests.decoding import DRAFTINGS
from tests.heads import CheatingHead, random_head, random_prompts
from tests.targets import FAMILIES, family_config, wrapped_config
from tests.tiny import save_tiny_target
from train.decode import plain_generate, speculative_generate

NEW = 12


def answer_of(target: Target, prompt: Tensor, *, new: int = NEW) -> list[int]:
    return plain_generate(target, prompt, max_new_tokens=new, stop_ids=()).tokens


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3", "mistral3"])
def test_targets_of_every_family_are_decoded_exactly(tmp_path, family):
    """Prompts shorter and longer than the window of 8 that half of the families have."""
    config = family_config(family) if family in FAMILIES else wrapped_config(family)
    save_tiny_target(tmp_path, config)
    target = load_target(TargetConfig(path=str(tmp_path), dtype="float32", device="cpu"))
    prompts = random_prompts(target, [2, 20, 7, 11])
    expected = [answer_of(target, prompt) for prompt in prompts]
    text = torch.cat([prompts[1], torch.tensor(answer_of(target, prompts[1], new=2 * NEW))])
    cheat = CheatingHead(target, text, {len(prompts[1]) + n for n in (3, 4, 9)})
    for drafting in DRAFTINGS.values():
        arguments = {"drafting": drafting, "max_new_tokens": NEW, "stop_ids": ()}
        batch = speculative_generate(target, random_head(target), prompts, **arguments)
        assert [generation.tokens for generation in batch] == expected
        alone = speculative_generate(target, cheat, prompts[1], **arguments)
        assert alone.tokens == expected[1]
        assert max(alone.accepted) >= 2 and min(alone.accepted) < 2
