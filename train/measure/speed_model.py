"""Speculation on paper: the expected speed-up from acceptance and the cost of two forwards.

A round drafts in S forwards of the head and verifies N tokens in one of the target. It yields τ
tokens, for each of which plain decoding needs a forward of its own. With B sequences at once

    speed-up(B) = τ · t(B) / ( d(B) + (S-1) · d(B·k) + t(B·N) )

where t(n) and d(n) are the seconds of a forward of target and head over n tokens. On a device that
waits for weights t(B·N) is hardly more than t(B), and the gain is nearly τ. Where it is busy with
arithmetic t grows with n, and each token that is checked in vain is paid for: larger batches come
to that point sooner, and there speculation stops paying.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

from train.measure.costs import Costs

BATCHES = (1, 2, 4, 8, 16, 32, 64)
MAX_DRAFT_TOKENS = 64  # nodes of the largest tree that is looked at
WIDTHS = (1, 2, 3, 4, 6, 8)  # that are looked at
CLEARLY = 1.02  # a larger tree must promise this much more: expectations are no more exact


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A way to draft, and what to expect of it."""

    num_steps: int  # S
    topk: int  # k
    num_draft_tokens: int  # N, with the root
    length: float  # τ
    speedup: float  # over plain decoding of the same batch
    batch_size: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def as_sglang(self) -> dict[str, Any]:
        """Under the names of SGLang's arguments."""
        return {
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": self.num_steps,
            "speculative_eagle_topk": self.topk,
            "speculative_num_draft_tokens": self.num_draft_tokens,
            "expected_acceptance_length": self.length,
            "expected_speedup": self.speedup,
            "batch_size": self.batch_size,
        }


def round_seconds(
    costs: Costs, *, batch_size: int, num_steps: int, topk: int, num_draft_tokens: int
) -> tuple[float, float]:
    """Seconds of drafting and of verifying in one round of `batch_size` sequences."""
    later = (num_steps - 1) * costs.draft_seconds(batch_size * topk)
    draft = costs.draft_seconds(batch_size) + later
    return draft, costs.target_seconds(batch_size * num_draft_tokens)


def expected_speedup(
    costs: Costs,
    length: float,
    *,
    batch_size: int,
    num_steps: int,
    topk: int,
    num_draft_tokens: int,
) -> float:
    """Tokens a second with the head over those without, at `batch_size` sequences at once."""
    seconds = round_seconds(
        costs,
        batch_size=batch_size,
        num_steps=num_steps,
        topk=topk,
        num_draft_tokens=num_draft_tokens,
    )
    return length * costs.target_seconds(batch_size) / sum(seconds)


def by_batch_size(costs: Costs, plan: Plan, batches: Sequence[int] = BATCHES) -> list[Plan]:
    """What to expect of one way to draft at each batch size."""
    shape = {
        "num_steps": plan.num_steps,
        "topk": plan.topk,
        "num_draft_tokens": plan.num_draft_tokens,
    }
    return [
        replace(
            plan,
            batch_size=size,
            speedup=expected_speedup(costs, plan.length, batch_size=size, **shape),
        )
        for size in batches
    ]


def stops_paying(plans: Sequence[Plan]) -> int | None:
    """The smallest batch size from which on no speed-up is expected; None if the last one has one.

    plans: in the order of their batch sizes
    """
    found = None
    for plan in reversed(plans):
        if plan.speedup > 1:
            break
        found = plan.batch_size
    return found


# --- trees --------------------------------------------------------------------------------------


def node_values(rates: Sequence[Sequence[float]], *, num_steps: int, topk: int) -> list[float]:
    """Chance of acceptance of every candidate of a tree, the best first.

    rates: [D][k]  how often the target's token is child number r of the accepted path, by depth

    As EAGLE-2 builds its tree, with average rates instead of the confidences of a place: each
    layer expands its k best nodes with k children. A node's value is the product of the rates on
    its path, so the first m are a connected tree, and 1 + their sum is the τ to expect of it.
    """
    layer = sorted(rates[0][:topk], reverse=True)
    values = list(layer)
    for depth in range(1, num_steps):
        beam = heapq.nlargest(topk, layer)
        layer = [value * rate for value in beam for rate in rates[depth][:topk]]
        values += layer
    return sorted(values, reverse=True)


def candidates(
    rates: Sequence[Sequence[float]], costs: Costs, *, batch_size: int
) -> Iterator[Plan]:
    """For each depth and each width the size that is expected to be the fastest."""
    for num_steps in range(1, len(rates) + 1):
        for topk in (width for width in WIDTHS if width <= len(rates[0])):
            values = node_values(rates, num_steps=num_steps, topk=topk)
            plans = []
            for count, gain in enumerate(accumulate(values[: MAX_DRAFT_TOKENS - 1]), start=1):
                if count < num_steps:
                    continue  # a tree of fewer steps
                shape = {
                    "num_steps": num_steps,
                    "topk": topk,
                    "num_draft_tokens": count + 1,
                }
                speedup = expected_speedup(costs, 1 + gain, batch_size=batch_size, **shape)
                plans.append(Plan(length=1 + gain, speedup=speedup, batch_size=batch_size, **shape))
            yield fastest(plans)


def fastest(plans: Sequence[Plan]) -> Plan:
    """The plan with the best speed-up; a smaller one where the best is not clearly better."""
    best = max(plan.speedup for plan in plans)
    good = [plan for plan in plans if plan.speedup * CLEARLY >= best]
    return min(good, key=lambda plan: (plan.num_draft_tokens, plan.num_steps, plan.topk))
