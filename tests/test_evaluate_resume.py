import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from data.lock import locked
from tests.evaluations import evaluation
from tests.heads import export_tiny
from train.config import EvaluateConfig
from train.measure.evaluate import evaluate

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def config(tmp_path_factory, target_path, head_path) -> EvaluateConfig:
    return evaluation(tmp_path_factory.mktemp("resume"), target_path, head_path)


@pytest.fixture(scope="module")
def report(config) -> dict:
    return evaluate(config)


def answers_of(out: Path) -> list[dict]:
    """All that does not depend on the clock."""
    lines = (out / "answers.jsonl").read_text().splitlines()[1:]
    found = [one for one in map(json.loads, lines) if "figure" not in one]
    for one in found:
        del one["plain"]["seconds"], one["drafted"]["seconds"]
    return found


def test_an_evaluation_that_is_killed_at_every_answer_goes_on(
    tmp_path, target_path, head_path, config
):
    result = subprocess.run(
        [sys.executable, "-m", "tests.kill_evaluate", target_path, head_path, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[-2]) == 5  # of 5 answers, and one survivor
    out = tmp_path / "out"
    report = evaluate(replace(config, limit=2, out=str(tmp_path / "straight")))
    assert answers_of(out) == answers_of(tmp_path / "straight")
    told = json.loads((out / "report.json").read_text())
    for key in ("alpha", "tried", "accepted", "interval", "tokens", "answers"):
        assert told["overall"][key] == report["overall"][key]
    assert told["calibration"] == report["calibration"]


def test_a_finished_evaluation_answers_nothing_again(config, report):
    before = (Path(config.out) / "answers.jsonl").read_bytes()
    again = evaluate(config)
    assert (Path(config.out) / "answers.jsonl").read_bytes() == before
    assert json.dumps(again) == json.dumps(report)


def test_more_prompts_of_the_same_sets_go_on(config, report, tmp_path):
    few = replace(config, out=str(tmp_path), limit=1)
    assert evaluate(few)["overall"]["answers"] == 3
    assert evaluate(replace(few, limit=None))["overall"]["answers"] == 6
    assert {json.dumps(one) for one in answers_of(tmp_path)} == {
        json.dumps(one) for one in answers_of(Path(config.out))
    }
    # Fewer again: the report is of those that are asked for.
    assert evaluate(few)["overall"]["answers"] == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_steps": 2}, r"settings.num_steps is 2 now, 3 there"),
        ({"tree": "dynamic"}, r"settings.tree is 'dynamic' now, 'chain' there"),
        ({"max_new_tokens": 8}, r"settings.max_new_tokens is 8 now"),
        ({"temperature": 0.5}, r"settings.temperature is 0.5 now"),
    ],
)
def test_other_settings_are_refused_by_name(config, report, changes, message):
    before = (Path(config.out) / "answers.jsonl").read_bytes()
    with pytest.raises(ValueError, match=message):
        evaluate(replace(config, **changes))
    assert (Path(config.out) / "answers.jsonl").read_bytes() == before


def test_another_head_is_refused_and_restart_measures_anew(
    config, report, target_path, tmp_path, tiny_target_and_head
):
    target, head = tiny_target_and_head
    other = replace(config, head=str(export_tiny(head, target, tmp_path)), out=str(tmp_path / "o"))
    evaluate(replace(config, out=other.out, limit=1))
    with pytest.raises(ValueError, match=r"head is '\w{16}' now, '\w{16}' there"):
        evaluate(other)
    anew = evaluate(replace(other, restart=True, limit=1))
    assert anew["overall"]["acceptance_length"] != report["overall"]["acceptance_length"]


def test_other_prompts_under_the_same_name_are_refused(config, target_path, head_path, tmp_path):
    mine = evaluation(tmp_path, target_path, head_path, limit=1)
    evaluate(mine)
    with (tmp_path / "maths.jsonl").open("a") as file:
        file.write('{"question": "one more?"}\n')
    with pytest.raises(ValueError, match=r"prompts.maths is '\w{64}' now"):
        evaluate(mine)


def test_a_second_evaluation_into_the_same_folder_is_kept_out(config, report):
    with (
        locked(Path(config.out) / ".lock", busy="held"),
        pytest.raises(RuntimeError, match=r"Another process measures into .* \(out=\.\.\.\)"),
    ):
        evaluate(config)
