import itertools

import pytest

from train.measure.costs import Costs, falling, interpolated, measure_costs
from train.measure.speed_model import (
    Plan,
    by_batch_size,
    candidates,
    expected_speedup,
    fastest,
    node_values,
    round_seconds,
    stops_paying,
)

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
RATES = [[0.6, 0.2, 0.05], [0.5, 0.2, 0.1], [0.4, 0.1, 0.1], [0.3, 0.1, 0.1]]


def costs(*, fixed: float, per_row: float, draft: float = 0.0) -> Costs:
    """A target whose forward takes a fixed time and some for each row; a head likewise, times
    `draft`."""
    seconds = tuple(fixed + per_row * count for count in ROWS)
    return Costs(
        context=10, rows=ROWS, target=seconds, draft=tuple(draft * value for value in seconds)
    )


def test_costs_between_and_past_the_measured_points_lie_on_lines():
    assert interpolated((1, 2, 4), (1.0, 3.0, 4.0), 3) == 3.5
    assert interpolated((1, 2, 4), (1.0, 3.0, 4.0), 8) == 6.0
    assert interpolated((1, 2, 4), (1.0, 3.0, 4.0), 4) == 4.0
    assert interpolated((2, 4), (1.0, 2.0), 1) == 1.0
    assert interpolated((2,), (1.0,), 9) == 1.0


def test_fewer_tokens_never_take_longer_than_more():
    assert falling([3.0, 1.0, 2.0, 5.0, 4.0]) == (1.0, 1.0, 2.0, 4.0, 4.0)


def test_a_round_is_one_draft_forward_per_step_and_one_forward_of_the_target():
    flat = costs(fixed=0.0, per_row=1.0, draft=0.25)
    draft, verify = round_seconds(flat, batch_size=2, num_steps=3, topk=4, num_draft_tokens=8)
    assert verify == 2 * 8
    assert draft == 0.25 * (2 + 2 * 4 + 2 * 4)


def test_a_device_that_waits_for_weights_gains_tau():
    shape = {"num_steps": 3, "topk": 2, "num_draft_tokens": 8}
    waiting = costs(fixed=1.0, per_row=0.0)
    assert expected_speedup(waiting, 3.2, batch_size=1, **shape) == pytest.approx(3.2)
    assert expected_speedup(waiting, 3.2, batch_size=64, **shape) == pytest.approx(3.2)
    drafting = costs(fixed=1.0, per_row=0.0, draft=0.1)
    assert expected_speedup(drafting, 3.2, batch_size=1, **shape) == pytest.approx(3.2 / 1.3)


def test_a_device_that_is_busy_pays_for_each_token_that_is_checked():
    busy = costs(fixed=0.0, per_row=1.0)
    shape = {"num_steps": 3, "topk": 2, "num_draft_tokens": 8}
    assert expected_speedup(busy, 3.2, batch_size=1, **shape) == pytest.approx(3.2 / 8)


def test_speculation_stops_paying_where_the_batch_fills_the_device():
    plan = Plan(num_steps=3, topk=1, num_draft_tokens=4, length=2.0, speedup=0.0, batch_size=1)
    # t(n) = 16 + n: 2 t(B) against t(4 B) is 32 + 2 B against 16 + 4 B, equal at B = 8
    plans = by_batch_size(costs(fixed=16.0, per_row=1.0), plan)
    assert [p.speedup > 1 for p in plans] == [True, True, True, False, False, False, False]
    assert plans[3].speedup == pytest.approx(1.0)
    assert stops_paying(plans) == 8
    assert stops_paying(by_batch_size(costs(fixed=1.0, per_row=0.0), plan)) is None
    assert stops_paying(by_batch_size(costs(fixed=0.0, per_row=1.0), plan)) == 1


def exhaustive(num_steps: int, size: int) -> float:
    """The largest sum of values over all trees of `size` nodes, by trying all sets of paths."""
    paths = [
        path
        for depth in range(1, num_steps + 1)
        for path in itertools.product(range(3), repeat=depth)
    ]

    def value(path: tuple) -> float:
        product = 1.0
        for depth, rank in enumerate(path):
            product *= RATES[depth][rank]
        return product

    sums = []
    for tree in itertools.combinations(paths, size):
        if all(path[:-1] in tree for path in tree if len(path) > 1):
            sums.append(sum(map(value, tree)))
    return max(sums)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_the_best_nodes_are_the_best_tree(size):
    values = node_values(RATES, num_steps=2, topk=3)
    assert sum(values[:size]) == pytest.approx(exhaustive(2, size))


def test_a_tree_has_the_candidates_that_sglang_has():
    for num_steps, topk in itertools.product((1, 2, 3, 4), (1, 2, 3)):
        values = node_values(RATES, num_steps=num_steps, topk=topk)
        assert len(values) == topk + (num_steps - 1) * topk**2
    assert node_values(RATES, num_steps=3, topk=1) == pytest.approx([0.6, 0.3, 0.12])


def test_the_choice_follows_the_machine():
    def choice(machine: Costs, batch_size: int = 1) -> Plan:
        return fastest(list(candidates(RATES, machine, batch_size=batch_size)))

    waiting = choice(costs(fixed=1.0, per_row=0.0005, draft=0.02))
    assert waiting.num_steps >= 3 and waiting.topk >= 2 and waiting.num_draft_tokens >= 8
    busy = choice(costs(fixed=0.0, per_row=1.0, draft=0.02))
    assert (busy.num_steps, busy.topk, busy.num_draft_tokens) == (1, 1, 2)
    between = costs(fixed=1.0, per_row=0.02, draft=0.02)
    assert choice(between).num_draft_tokens > choice(between, 16).num_draft_tokens
    slow_head = choice(costs(fixed=1.0, per_row=0.0005, draft=0.5))
    assert slow_head.num_steps == 1


def test_a_chain_drafts_every_step():
    for plan in candidates(RATES, costs(fixed=1.0, per_row=0.5), batch_size=1):
        assert plan.topk > 1 or plan.num_draft_tokens == plan.num_steps + 1


def test_measured_costs_are_times_of_forwards(tiny_target_and_head):
    target, head = tiny_target_and_head
    measured = measure_costs(target, head, context=20, rows=(1, 4, 64))
    assert measured.rows == (1, 4, 64) and measured.context == 20
    assert all(0 < seconds < 5 for seconds in (*measured.target, *measured.draft))
    assert list(measured.target) == sorted(measured.target)
    # Two layers over 64 rows are more work than one layer over 1 row.
    assert measured.target[2] > measured.draft[0]
    assert Costs.from_json(measured.to_json()) == measured


def test_rows_that_the_target_has_no_positions_for_are_not_measured(tiny_target_and_head):
    target, head = tiny_target_and_head
    assert measure_costs(target, head, context=600, rows=(1, 256, 512)).context == 256
