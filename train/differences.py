"""Where two answers to one prompt differ, and why."""

from typing import Any

import torch
from torch import Tensor

from data.target import Target
from train.decode import TargetStream


@torch.inference_mode()
def explain_difference(
    target: Target, ids: Tensor, plain: list[int], drafted: list[int], *, greedy: bool = True
) -> dict[str, Any] | None:
    """Where two answers to one prompt first differ, and whether the target was undecided there.

    The two decoders run the target over other numbers of rows at once, which rounds differently.
    How differently is measured at this very place: the logits as plain decoding had them, token
    by token, against those from one forward over the same tokens.

    greedy: whether tokens are the likeliest ones; drawn tokens say nothing about two logits
    """
    if plain == drafted:
        return None
    common = next(
        (i for i, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b),
        min(len(plain), len(drafted)),
    )
    ours, theirs = drafted[common:][:1], plain[common:][:1]
    found = {"position": common, "with_head": ours, "without_head": theirs}
    if not (greedy and ours and theirs):  # or one answer is the beginning of the other
        return found | {"logit_gap": None, "rounding": None, "near_tie": False}
    ids = ids.to(target.device)
    answer = ids.new_tensor(plain[:common])
    stepwise = TargetStream(target)
    last = stepwise.append(ids)[-1]
    for token in answer.split(1):
        last = stepwise.append(token)[-1]
    logits = target.head.logits(last)  # [V]
    at_once = target.head.logits(TargetStream(target).append(torch.cat([ids, answer]))[-1])
    gap = float((logits[theirs] - logits[ours]).abs())
    rounding = float((at_once - logits).abs().max())
    # Either logit may be off by the rounding.
    return found | {"logit_gap": gap, "rounding": rounding, "near_tie": gap <= 2 * rounding}
