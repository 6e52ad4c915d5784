"""Where answers that should be equal differ, and what the target itself thinks of it."""

from collections.abc import Sequence
from typing import Any

from data.config import TargetConfig
from data.targets.model import load_target
from train.decode import recheck
from train.serve.check_prompts import PromptSet
from train.serve.check_report import first_difference


def differences(
    one: PromptSet,
    answers: Sequence[list[int]],
    others: Sequence[list[int]],
    *,
    compared_with: str,
    num_steps: int,
) -> list[dict[str, Any]]:
    """The first difference of each pair of answers to the prompts of a set.

    answers: the engine's with the head; others: those that they should equal
    """
    found = []
    for prompt, a, b in zip(one.prompts, answers, others, strict=True):
        position = first_difference(a, b)
        if position is not None:
            found.append(
                {
                    "set": one.name,
                    "prompt": prompt.id,
                    "num_steps": num_steps,
                    "compared_with": compared_with,
                    "position": position,
                    "engine_with_head": a[position] if position < len(a) else None,
                    "other": b[position] if position < len(b) else None,
                    "common": a[:position],
                }
            )
    return found


def explain(found: list[dict[str, Any]], sets: Sequence[PromptSet], config: TargetConfig) -> None:
    """Add what the target itself thinks of the two tokens: a near-tie is no fault of the head."""
    target = load_target(config)
    is_quantised = target.fingerprint["quantization"] != "none"
    tokens = {
        (one.name, prompt.id): ids
        for one in sets
        for prompt, ids in zip(one.prompts, one.tokens, strict=True)
    }
    for difference in found:
        prompt = tokens[difference["set"], difference["prompt"]]
        common = difference.pop("common")
        first, second = difference["engine_with_head"], difference["other"]
        if first is None or second is None or is_quantised:
            continue  # one answer ended early, or the arithmetic cannot be done again in float64
        seen = recheck(target, prompt, common, first, second)
        difference |= {"logit_gap": seen.logit_gap, "near_tie": seen.near_tie}
