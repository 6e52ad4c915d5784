import pytest

from train.measure.confidence import calibration, tried_nodes
from train.measure.summary import acceptance, shares, summaries


def answer(accepted: list[int], *, prompt="a", set_name="chat", tokens=10, **more) -> dict:
    seconds = {"total": 4.0, "prefill": 1.0, "draft": 1.0, "verify": 1.5, "other": 0.5}
    plain = {"total": 2.0, "prefill": 1.0, "draft": 0.0, "verify": 1.0, "other": 0.0}
    return {
        "set": set_name,
        "prompt": prompt,
        "turn": 1,
        "category": "",
        "plain": {"tokens": [7] * tokens, "seconds": plain},
        "drafted": {"tokens": [7] * tokens, "seconds": seconds, "accepted": accepted},
        "baselines": {},
        **more,
    }


def test_five_rounds_by_hand():
    """The example that every report explains its figures with."""
    found = acceptance([answer([2, 0, 3, 1, 0])], num_steps=3)
    assert found["tried"] == [5, 3, 2] and found["accepted"] == [3, 2, 1]
    assert found["alpha"] == pytest.approx([3 / 5, 2 / 3, 1 / 2])
    assert found["acceptance_length"] == pytest.approx(2.2)
    assert found["acceptance_length_without_bonus"] == pytest.approx(1.2)
    assert found["interval"] is None  # of one prompt


def test_the_interval_draws_prompts_not_turns():
    even = [answer([1, 1, 0, 0], prompt=str(n)) for n in range(12)]
    apart = [answer([3, 3, 3, 3] if n % 2 else [0] * 4, prompt=str(n)) for n in range(12)]
    assert acceptance(even, num_steps=3)["interval"] == pytest.approx([1.5, 1.5])
    low, high = acceptance(apart, num_steps=3)["interval"]
    assert low < 2.0 and high > 3.0
    turns = [answer([3, 3]), answer([0, 0], turn=2)]
    assert acceptance(turns, num_steps=3)["interval"] is None
    # The same prompt id in another set is another prompt.
    others = [answer([1, 1, 0, 0]), answer([1, 1, 0, 0], set_name="maths")]
    assert acceptance(others, num_steps=3)["interval"] is not None


def test_speeds_and_shares():
    overall = summaries([answer([1] * 5), answer([1] * 5, prompt="b")], num_steps=3)["overall"]
    assert overall["tokens_per_second"] == {"with_head": 20 / 8, "without_head": 20 / 4}
    assert overall["speedup"] == pytest.approx(0.5)
    # Without each answer's first token and without the prefill: 18 tokens in 6 and in 2 seconds.
    assert overall["tokens_per_second_after_prefill"] == {"with_head": 3.0, "without_head": 9.0}
    assert shares(overall["seconds"]["with_head"]) == pytest.approx(
        {"prefill": 0.25, "draft": 0.25, "verify": 0.375, "other": 0.125}
    )


def test_a_baseline_is_counted_in_forwards():
    run = {"tokens": [7] * 10, "seconds": {"total": 1.0}, "forwards": 4}
    wrong = run | {"tokens": [7] * 9 + [8]}
    answers = [answer([1], baselines={"assistant": one}) for one in (run, wrong)]
    found = summaries(answers, num_steps=3)["overall"]["baselines"]["assistant"]
    assert found["acceptance_length"] == pytest.approx(20 / 8)
    assert found["tokens_per_second"] == pytest.approx(10) and found["speedup"] == pytest.approx(2)
    assert found["outputs_equal"] == 1


# A root with children 1 and 2; 1 has children 3 and 4; 3 has child 5.
TREE = {
    "parents": [-1, 0, 0, 1, 1, 3],
    "confidences": [1.0, 0.62, 0.21, 0.99, 1.0, 0.33],
}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ([], [(0.62, False), (0.21, False)]),
        ([2], [(0.62, False), (0.21, True)]),
        ([1], [(0.62, True), (0.21, False), (0.99, False), (1.0, False)]),
        ([1, 3], [(0.62, True), (0.21, False), (0.99, True), (1.0, False), (0.33, False)]),
    ],
)
def test_a_node_counts_if_its_parent_was_accepted(path, expected):
    assert list(tried_nodes([TREE | {"path": path}])) == expected


def test_bins_hold_what_falls_into_them():
    nodes = [(0.01, False), (0.04, True), (0.97, True), (1.0, True), (0.05, False)]
    found = calibration(nodes)
    assert [(b["from"], b["nodes"]) for b in found["bins"]] == [(0.0, 2), (0.05, 1), (0.95, 2)]
    assert found["bins"][0]["accepted"] == 0.5
    assert found["bins"][0]["confidence"] == pytest.approx(0.025)
    expected = (2 * 0.475 + 1 * 0.05 + 2 * 0.015) / 5
    assert found["expected_calibration_error"] == pytest.approx(expected)
    assert calibration([])["expected_calibration_error"] is None


def test_a_head_that_is_right_as_often_as_it_is_sure_has_no_error():
    nodes = [(0.75, n % 4 > 0) for n in range(400)] + [(0.25, n % 4 == 0) for n in range(400)]
    assert calibration(nodes)["expected_calibration_error"] == pytest.approx(0)
    sure = [(0.95, accepted) for _, accepted in nodes]
    assert calibration(sure)["expected_calibration_error"] == pytest.approx(0.45)
