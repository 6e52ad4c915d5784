import json
import re
from dataclasses import replace

import pytest

from tests.evaluations import evaluation
from train.measure.choose_tree import requested, tree_table
from train.measure.evaluate import evaluate
from train.measure.report_text import table
from train.measure.speed_model import CLEARLY


@pytest.fixture(scope="module")
def config(tmp_path_factory, target_path, head_path):
    folder = tmp_path_factory.mktemp("trees")
    return evaluation(folder, target_path, head_path, limit=3, max_new_tokens=10)


def test_a_tree_has_sglangs_usual_sizes_unless_it_is_told_others():
    assert requested("chain", num_steps=5, topk=None, num_draft_tokens=None).num_draft_tokens == 6
    usual = requested("dynamic", num_steps=5, topk=None, num_draft_tokens=None)
    assert (usual.num_steps, usual.topk, usual.num_draft_tokens) == (5, 4, 8)
    told = requested("dynamic", num_steps=2, topk=3, num_draft_tokens=9)
    assert (told.num_steps, told.topk, told.num_draft_tokens) == (2, 3, 9)
    with pytest.raises(ValueError, match="num_draft_tokens is 60"):
        requested("dynamic", num_steps=2, topk=2, num_draft_tokens=60)


@pytest.mark.parametrize("tree", ["static", "dynamic"])
def test_trees_answer_as_plain_decoding_does(config, tmp_path, tree):
    changes = {"tree": tree, "topk": 3, "num_draft_tokens": 9, "out": str(tmp_path / tree)}
    report = evaluate(replace(config, **changes))
    assert report["outputs_equal"] == report["overall"]["answers"]
    drafting = report["settings"]["drafting"]
    assert drafting["tree"] == tree and drafting["num_draft_tokens"] <= 9
    assert len(drafting["paths"]) == (drafting["num_draft_tokens"] - 1 if tree == "static" else 0)
    lines = (tmp_path / tree / "answers.jsonl").read_text().splitlines()[1:]
    answers = [one for one in map(json.loads, lines) if "set" in one]
    ranks = [
        one["ranks"][node]
        for answer in answers
        for one in answer["drafted"]["rounds"]
        for node in one["path"]
    ]
    assert 0 in ranks
    nodes = sum(len(one["tokens"]) - 1 for a in answers for one in a["drafted"]["rounds"])
    assert report["calibration"]["nodes"] <= nodes
    assert f"{tree} tree of" in table(report)


def test_auto_takes_the_tree_that_its_table_marks_and_keeps_it(config, tmp_path, caplog):
    auto = replace(config, tree="auto", tree_prompts=3, out=str(tmp_path))
    with caplog.at_level("INFO", logger="train.measure.choose_tree"):
        report = evaluate(auto)
    marked = [line for line in caplog.messages if "*" in line and "depth" not in line]
    assert any("the fastest" in line for line in marked)
    drafting = report["settings"]["drafting"]
    row = next(line for line in marked if line.split()[0] == str(drafting["num_steps"]))
    assert f"{drafting['num_draft_tokens']:>3})*" in row
    speedups = [float(x) for x in re.findall(r"([\d.]+)x \(", "\n".join(caplog.messages))]
    chosen = float(re.findall(r"([\d.]+)x \([^)]*\)\*", row)[0])
    assert chosen * CLEARLY + 0.01 >= max(speedups) > min(speedups)
    # Costs differ from one measurement to the next; what was chosen must not.
    again = evaluate(auto)
    assert again["settings"]["drafting"] == drafting and again["overall"] == report["overall"]
    assert again["tree_table"] == report["tree_table"]


def test_a_static_tree_is_shaped_by_the_first_prompts(config, tmp_path):
    report = evaluate(
        replace(config, tree="static", tree_prompts=1, num_draft_tokens=4, out=str(tmp_path))
    )
    paths = report["settings"]["drafting"]["paths"]
    assert [0] in [list(path) for path in paths] and len(paths) == 3


def test_the_table_shows_every_depth_and_width_once():
    plans = [
        {
            "num_steps": depth,
            "topk": width,
            "num_draft_tokens": 1 + depth * width,
            "length": 1.5,
            "speedup": 1 + depth / 10 + width / 100,
            "batch_size": 2,
        }
        for depth in (1, 2)
        for width in (1, 4)
    ]
    lines = tree_table(plans, plans[3])
    assert "at batch size 2" in lines[0] and lines[1].split() == [
        "depth",
        "width",
        "1",
        "width",
        "4",
    ]
    assert lines[3].split() == ["2", "1.21x", "(1.50,", "3)", "1.24x", "(1.50,", "9)*"]
    assert sum("*" in line for line in lines[:-1]) == 1


@pytest.mark.parametrize("tree", ["chain", "auto"])
def test_sizes_of_a_tree_are_refused_where_there_is_none(config, tree):
    with pytest.raises(ValueError, match=f"are of a tree, but tree={tree}"):
        replace(config, tree=tree, topk=4)
