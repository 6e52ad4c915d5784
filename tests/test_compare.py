"""Runs side by side: what the table says is what the runs wrote."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from data.files import write_json
from tests.training import ROOT, rows, small_run
from train.comparing.runs import find_runs, read_run
from train.comparing.table import compare
from train.config import CompareConfig, LossConfig
from train.fit.loop import fit


@pytest.fixture(scope="module")
def finished(cache_path, tmp_path_factory) -> Path:
    """A folder of two runs that differ in two settings."""
    folder = tmp_path_factory.mktemp("sweep")
    slow = small_run(cache_path, folder / "slow", lr=1e-6, max_steps=20)
    fit(slow)
    fit(replace(slow, out=str(folder / "quick"), lr=5e-3, loss=LossConfig(ce_weight=0.5)))
    return folder


@pytest.fixture
def runs(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "runs"))


def lines(table: str) -> list[list[str]]:
    """The words of the heading and of each run's line."""
    heading, _, *rest = table.splitlines()
    return [line.split() for line in (heading, *rest[: rest.index("")])]


def change(file: Path, **values) -> None:
    write_json(file, json.loads(file.read_text()) | values)


def test_the_longest_acceptance_comes_first_and_only_what_differs_is_shown(runs):
    heading, *shown = lines(compare(CompareConfig(runs=str(runs))))
    assert heading[:4] == ["run", "loss.ce_weight", "lr", "steps"]
    assert [row[:4] for row in shown] == [
        ["quick", "0.5", "0.005", "20"],
        ["slow", "0.1", "1e-06", "20"],
    ]


def test_figures_are_those_of_the_run(runs):
    steps = rows(runs / "quick", "lr")
    best = json.loads((runs / "quick" / "best.json").read_text())
    summary, _ = read_run(runs / "quick", name="quick")
    assert summary.smooth_l1 == (steps[-2]["smooth_l1"] + steps[-1]["smooth_l1"]) / 2
    assert summary.best == best and summary.length == best["acceptance_length"]
    seconds = sum(row["seconds"] for row in steps)
    assert summary.tokens_per_second == sum(row["supervised"] for row in steps) / seconds
    assert summary.seconds >= seconds  # estimates and checkpoints take time as well
    _, quick, _ = lines(compare(CompareConfig(runs=str(runs))))
    assert f"{summary.length:.3f}" in quick and f"{summary.cross_entropy:.3f}" in quick
    low, high = best["interval"]
    assert f"{low:.3f} - {high:.3f}" in " ".join(quick)
    assert quick[-3] == str(best["step"])


def test_json_and_picture_are_written(runs):
    compare(CompareConfig(runs=str(runs)))
    record = json.loads((runs / "compare.json").read_text())
    assert [run["name"] for run in record["runs"]] == ["quick", "slow"]
    assert record["runs"][0]["best"]["acceptance_length"] > 1
    assert (runs / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_runs_that_are_not_over_are_marked_with_why(runs):
    """One is running and in the middle of a line, one stopped early, one met a loss of nan."""
    for name in ("running", "early", "broken", "new"):
        shutil.copytree(runs / "slow", runs / name)
        change(runs / name / "run.json", result=None)
    log = (runs / "running" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (runs / "running" / "metrics.jsonl").write_text("".join(log[:7]) + log[7][:20])
    change(runs / "early" / "run.json", result={"step": 20, "why": "patience"})
    write_json(runs / "broken" / "nonfinite.json", {"step": 21, "what": "loss"})
    (runs / "new" / "metrics.jsonl").unlink()

    shown = {row[0]: " ".join(row) for row in lines(compare(CompareConfig(runs=str(runs))))}
    assert " 6 of 20 " in shown["running"] and shown["running"].endswith("* unfinished")
    assert shown["early"].endswith("* stopped early")
    assert shown["broken"].endswith("* loss not finite")
    assert " 0 of 20 - - - - - - - - 0:00:00 * unfinished" in shown["new"]
    assert "*" not in shown["quick"]


def test_a_loss_that_the_run_has_left_behind_does_not_mark_it(runs):
    change(runs / "slow" / "run.json", result=None)
    write_json(runs / "slow" / "nonfinite.json", {"step": 3, "what": "loss"})
    assert read_run(runs / "slow", name="slow")[0].state == "unfinished"


def test_other_held_out_chats_are_warned_of(runs):
    assert "WARNING" not in compare(CompareConfig(runs=str(runs)))
    settings = json.loads((runs / "slow" / "run.json").read_text())["settings"]
    change(runs / "slow" / "run.json", settings=settings | {"seed": 1})
    assert "WARNING: seed differ: τ is not measured" in compare(CompareConfig(runs=str(runs)))


def test_runs_are_found_one_by_one_in_a_folder_and_in_folders_of_it(runs):
    assert find_runs(runs / "slow") == [runs / "slow"]
    assert find_runs(runs) == find_runs(runs.parent) == [runs / "quick", runs / "slow"]
    both = CompareConfig(runs=[str(runs / "slow"), str(runs / "quick")])
    _, first, second = lines(compare(both))
    assert [first[0], second[0]] == [str(runs / "quick"), str(runs / "slow")]
    assert (runs / "slow" / "compare.png").is_file()


def test_a_place_without_runs_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nix does not exist.*--multirun"):
        compare(CompareConfig(runs=str(tmp_path / "nix")))
    with pytest.raises(FileNotFoundError, match="holds no run"):
        compare(CompareConfig(runs=str(tmp_path)))


def test_a_run_of_another_version_is_named(runs):
    change(runs / "slow" / "run.json", format_version=0)
    with pytest.raises(ValueError, match=r"slow/run.json has format_version 0, .* reads 1"):
        compare(CompareConfig(runs=str(runs)))


def test_the_command_shows_the_table_without_loading_torch(runs):
    """It once would have taken three seconds, for an import that it does not need."""
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['compare_runs', 'runs={runs}']\n"
        "runpy.run_module('scripts.compare_runs', run_name='__main__')\n"
        "assert not {'torch', 'transformers', 'accelerate'} & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert lines(result.stdout)[1][0] == "quick"
