"""What one forward of the target and of the head costs on this machine, by its number of rows."""

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from data.targets.model import Target
from train.head import DraftHead

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # tokens of one forward, of all sequences together
REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of one forward over some new tokens, with the output head on each of them.

    Other programs only ever add to a time, so each is the shortest of a few, and none longer than
    that of more tokens. The new tokens are of one sequence; those of a batch cost the same but for
    attention, which is the smaller part.
    """

    context: int  # tokens that the new ones attend to
    rows: tuple[int, ...]  # new tokens, ascending
    target: tuple[float, ...]  # seconds
    draft: tuple[float, ...]

    def target_seconds(self, rows: float) -> float:
        return interpolated(self.rows, self.target, rows)

    def draft_seconds(self, rows: float) -> float:
        return interpolated(self.rows, self.draft, rows)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Costs":
        of_rows = {key: tuple(values[key]) for key in ("rows", "target", "draft")}
        return cls(context=values["context"], **of_rows)


def interpolated(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """The value at x of the line through (xs, ys), which goes on straight past the last point."""
    if len(xs) == 1 or x <= xs[0]:
        return ys[0]
    right = min(bisect_left(xs, x), len(xs) - 1)
    share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + share * (ys[right] - ys[right - 1])


@torch.inference_mode()
def measure_costs(
    target: Target, head: DraftHead, *, context: int, rows: Sequence[int] = ROWS
) -> Costs:
    """Time forwards of the target and of the head over each number of new tokens.

    context: tokens in both caches; cut to what the target has positions for
    """
    positions = target.model.config.get_text_config().max_position_embeddings
    rows = [count for count in rows if count < positions]
    context = max(1, min(context, positions - rows[-1]))
    ids = torch.arange(context + rows[-1], device=target.device) % len(target.head.weight)
    of_target = _target_forward(target, ids, context)
    of_head = _head_forward(target, head, ids, context)
    return Costs(
        context=context,
        rows=tuple(rows),
        target=_shortest(of_target, rows, target.device),
        draft=_shortest(of_head, rows, target.device),
    )


def _target_forward(target: Target, ids: Tensor, context: int) -> Callable[[int], Tensor]:
    backbone, cache = target.model.get_decoder(), DynamicCache()
    backbone(input_ids=ids[None, :context], past_key_values=cache, use_cache=True)

    def forward(count: int) -> Tensor:
        new = ids[None, context : context + count]
        features = backbone(input_ids=new, past_key_values=cache, use_cache=True)
        cache.crop(-count)
        return target.head.logits(features.last_hidden_state[0]).argmax(dim=-1)

    return forward


def _head_forward(
    target: Target, head: DraftHead, ids: Tensor, context: int
) -> Callable[[int], Tensor]:
    config = head.config
    assert config.num_key_value_heads and config.head_dim  # `draft_config` writes both
    shape = (1, config.num_key_value_heads, context, config.head_dim)
    keys = torch.ones(shape, device=target.device, dtype=target.dtype)
    features = torch.ones(len(ids), config.hidden_size, device=target.device, dtype=target.dtype)

    def forward(count: int) -> Tensor:
        new = slice(context, context + count)
        x = head.fuse(target.head.embed(ids[new]).to(target.dtype), features[new])
        positions = torch.arange(context, context + count, device=target.device)
        query, key, value = head.query_key_value(x, positions)
        attended = F.scaled_dot_product_attention(
            query[None],
            torch.cat([keys, key[None]], dim=2),
            torch.cat([keys, value[None]], dim=2),
            enable_gqa=True,
        )
        logits = target.head.logits(head.finish(x, attended[0]))
        return logits.softmax(dim=-1).topk(min(8, logits.shape[-1])).indices

    return forward


def _shortest(
    forward: Callable[[int], Tensor], rows: Sequence[int], device: torch.device
) -> tuple[float, ...]:
    """Seconds for each number of rows, in turns, so that a busy moment does not hit only one."""
    times: list[list[float]] = [[] for _ in rows]
    for _ in range(1 + REPEATS):  # the first ones allocate
        for place, count in enumerate(rows):
            start = time.perf_counter()
            forward(count)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times[place].append(time.perf_counter() - start)
    return falling([min(each[1:]) for each in times])


def falling(seconds: Sequence[float]) -> tuple[float, ...]:
    """Each time, or that of more tokens where that is shorter: fewer cannot take longer."""
    return tuple(accumulate(reversed(seconds), min))[::-1]
