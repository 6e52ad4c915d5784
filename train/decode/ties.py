"""Whether the target was undecided between two tokens, by doing its arithmetic again in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from data.targets.model import Target
from train.decode.target_stream import TargetStream


@dataclass(frozen=True)
class Recheck:
    """Two tokens that may follow a text, seen by the target in float64."""

    logit_gap: float  # between the two tokens
    behind: float  # how far the worse of the two is behind the best of all tokens
    rounding: float  # how far the logits are off in the target's own dtype, at most

    @property
    def near_tie(self) -> bool:
        """Whether rounding alone can put either token first: each logit may be off by it."""
        return self.behind <= 2 * self.rounding


@torch.inference_mode()
def recheck(
    target: Target, prompt: list[int], answer: list[int], first: int, second: int
) -> Recheck:
    """Compare two tokens in float64, and with how the target's own dtype rounds.

    answer: the common beginning of two answers to the prompt, which go on with the two tokens

    Decoders run the target over other numbers of rows at once, which rounds differently. The
    rounding is measured at this very place: in one forward over all, and as plain decoding does
    it, the answer token by token.
    Needs memory for the target's weights in float64. Raises ValueError for a quantised target.
    """
    ids = torch.tensor([[*prompt, *answer]], device=target.device)
    own = [_logits(target, ids), _logits(target, ids, stepwise=len(answer))]
    with in_float64(target):
        exact = _logits(target, ids)  # [V]
    pair = exact[[first, second]]
    return Recheck(
        logit_gap=float((pair[0] - pair[1]).abs()),
        behind=float(exact.max() - pair.min()),
        rounding=max(float((logits.double() - exact).abs().max()) for logits in own),
    )


def explain_difference(
    target: Target, prompt: Tensor, plain: list[int], other: list[int]
) -> dict[str, Any] | None:
    """Where two greedy answers to a prompt [T] first differ, and whether it is a near-tie.

    None if they are equal. Where one is the beginning of the other there are no two tokens to
    compare, and it is no near-tie.
    """
    if plain == other:
        return None
    shorter = min(len(plain), len(other))
    place = next((i for i in range(shorter) if plain[i] != other[i]), shorter)
    found: dict[str, Any] = {
        "position": place,
        "with_head": other[place : place + 1],
        "without_head": plain[place : place + 1],
    }
    if place == shorter:
        return found | {"logit_gap": None, "rounding": None, "near_tie": False}
    seen = recheck(target, prompt.tolist(), plain[:place], plain[place], other[place])
    return found | {
        "logit_gap": seen.logit_gap,
        "rounding": seen.rounding,
        "near_tie": seen.near_tie,
    }


def _logits(target: Target, ids: Tensor, *, stepwise: int = 0) -> Tensor:
    """After the last of some tokens [1, T], of which the last `stepwise` are run one by one: [V]"""
    stream, length = TargetStream(target), ids.shape[1]
    features = stream.append(ids[:, : length - stepwise])
    for place in range(length - stepwise, length):
        features = stream.append(ids[:, place : place + 1])
    return target.head.logits(features[0, -1])


@contextmanager
def in_float64(target: Target) -> Iterator[None]:
    """Widen the target's weights for a while, and all that its code does in float32.

    Raises ValueError for a quantised target.
    """
    weights = [*target.model.parameters(), *target.model.buffers(), *target.head.buffers()]
    if not all(w.is_floating_point() or w.dtype in (torch.int64, torch.bool) for w in weights):
        raise ValueError(
            "The target is quantised, and its arithmetic cannot be done again in float64. Compare "
            "the answers of its unquantised original."
        )
    narrow = [(weight, weight.data) for weight in weights if weight.is_floating_point()]
    dtype = target.dtype
    experts = target.model.get_experts_implementation()
    try:
        target.model.set_experts_implementation("eager")  # grouped products know no float64
        wide: dict[int, Tensor] = {}  # tied matrices stay one
        for weight, data in narrow:
            weight.data = wide.setdefault(data.data_ptr(), data.double())
        target.dtype = torch.float64
        with _Float64():
            yield
    finally:
        for weight, data in narrow:
            weight.data = data
        target.dtype = dtype
        target.model.set_experts_implementation(experts)


class _Float64(TorchFunctionMode):
    """Models compute norms, softmax and rotations in float32 whatever they run in: widen these."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {
            key: torch.float64 if value is torch.float32 else value
            for key, value in (kwargs or {}).items()
        }
        return func(*args, **kwargs)
