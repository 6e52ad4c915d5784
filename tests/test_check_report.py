"""What a check says of counts and differences, and when it fails."""

import logging

import pytest

from train.serve.check_report import (
    accepts_nothing,
    advice,
    compare_set,
    first_difference,
    passed,
    show,
    wilson,
)
from train.serve.engine_vllm import Counters
from train.serve.rules import OTHER, REFUSED

# Accepted draft tokens of each round of six prompts.
OURS = [[0, 1, 2, 1], [2, 2, 0, 1], [0, 0, 1, 0], [1, 2, 1, 1], [0, 2, 2, 0], [1, 0, 1, 2]]


def compare(ours: list[list[int]] = OURS, *, drafts: int = 24, per_step: tuple = (16, 7)) -> dict:
    counters = Counters(
        drafts=drafts,
        draft_tokens=drafts * len(per_step),
        accepted_tokens=sum(per_step),
        accepted_per_step=list(per_step),
    )
    names = [f"p{i}" for i in range(len(ours))]
    return compare_set(
        name="set", num_steps=len(per_step), prompts=names, ours=ours, counters=counters,
        seconds=1.0, seconds_without_head=2.0,
    )  # fmt: skip


def report(*checks: dict, **changes) -> dict:
    good = {
        "checks": list(checks) or [compare()],
        "differences": [],
        "findings": [],
        "recorded": {"acceptance_length": 1.9},
        "parity": {"close": True, "positions_equal": True, "max_difference": 1e-6}
        | {"largest": 3.0, "positions": 20},
        "num_tokens": 100,
        "dtype": "float32",
    }
    found = {**good, **changes}
    return found | {"passed": passed(found)}


def test_the_first_difference_is_a_token_or_an_early_end():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [7]) == 0


def test_equal_counts_are_equal_whatever_the_interval_says():
    same = compare()
    assert same["counters_equal"] and same["close"] and same["relative_difference"] == 0
    assert same["ours"]["accepted"] == same["engine"]["accepted"] == [16, 7]
    # No prompt ever accepts: the interval is a point.
    nothing = compare([[0, 0], [0, 0]], drafts=4, per_step=(0, 0))
    assert nothing["close"] and nothing["ours"]["interval"] == [1.0, 1.0]


def test_acceptance_inside_our_interval_is_close_and_outside_is_not():
    low, high = compare()["ours"]["interval"]
    assert low < compare()["ours"]["acceptance_length"] < high
    near, far = compare(per_step=(15, 7)), compare(per_step=(4, 1))
    assert near["close"] and not near["counters_equal"]
    assert not far["close"] and far["engine"]["acceptance_length"] < low


def test_a_step_outside_its_interval_fails_although_the_length_agrees():
    many = OURS * 40
    good = compare(many, drafts=960, per_step=(640, 280))
    assert good["close"]
    # The same tokens a round, but from other steps.
    bad = compare(many, drafts=960, per_step=(480, 440))
    assert bad["engine"]["acceptance_length"] == pytest.approx(good["engine"]["acceptance_length"])
    assert not bad["close"]


def test_one_prompt_has_no_interval_and_three_percent_of_room():
    assert compare([OURS[0]], drafts=4, per_step=(3, 1))["close"]
    far = compare([OURS[0]], drafts=8, per_step=(5, 1))
    assert far["ours"]["interval"] is None and not far["close"]


def test_wilsons_interval_is_inside_the_unit_and_shrinks_with_counts():
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(5, 10)
    assert low == pytest.approx(0.184, abs=2e-3) and high == pytest.approx(0.816, abs=2e-3)
    assert 0.45 < wilson(500, 1000)[0] < wilson(500, 1000)[1] < 0.55
    assert wilson(0, 10)[0] == pytest.approx(0, abs=1e-12) and wilson(10, 10)[1] <= 1 + 1e-12


DIFFERENCE = {
    "set": "set", "prompt": "p0", "num_steps": 2, "position": 3, "compared_with": "ours",
    "engine_with_head": 5, "other": 6,
}  # fmt: skip
TIE = DIFFERENCE | {"near_tie": True, "logit_gap": 1e-4}
FAULT = DIFFERENCE | {"near_tie": False, "logit_gap": 2.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"checks": [compare(per_step=(4, 1))]}, "the engine accepts less"),
        ({"differences": [TIE]}, "near-tie"),
        ({"differences": [TIE, FAULT]}, "a fault"),
        # One answer ended early: there are no two tokens whose logits could tie.
        ({"differences": [DIFFERENCE]}, "a fault"),
        ({"checks": [compare([[0] * 24] * 2, drafts=48, per_step=(0, 0))]}, "hardly anything"),
        ({"findings": [{"rule": "fc-halves", "verdict": OTHER}]}, "halves"),
        ({"checks": [], "findings": [{"rule": "prefix", "verdict": REFUSED}]}, "prefix"),
        (
            {"parity": {"close": False, "positions_equal": True, "max_difference": 1.0}
             | {"largest": 3.0, "positions": 20}},
            "computes other features",
        ),
    ],
)  # fmt: skip
def test_whatever_is_wrong_fails_the_check_and_says_where_to_look(changes, words, caplog):
    caplog.set_level(logging.INFO, logger="train")
    assert report()["passed"] and advice(report()) == []
    bad = report(**changes)
    assert not bad["passed"]
    assert any(words in line for line in advice(bad))
    show(bad)
    assert "FAILED" in caplog.text and words in caplog.text


def test_a_server_that_makes_other_token_ids_fails_the_check():
    server = {"prompts": 2, "prompts_equal": False, "acceptance_length": 1.9}
    assert not report(server=server)["passed"]
    assert report(server=server | {"prompts_equal": True})["passed"]


def test_a_head_that_never_accepted_anything_is_not_called_dead():
    dead = compare([[0] * 12] * 2, drafts=24, per_step=(0, 0))
    assert not accepts_nothing(report(dead, recorded=None))
    assert not accepts_nothing(report(dead, recorded={"acceptance_length": 1.0}))
    assert accepts_nothing(report(dead))
