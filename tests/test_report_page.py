import base64
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.evaluations import evaluation
from tests.pages import Page
from train.measure.answers import first_difference
from train.measure.evaluate import evaluate
from train.measure.report import write_report
from train.measure.report_page import page
from train.measure.report_text import pays_text, table
from train.measure.report_trees import tree_svg

TREE = {
    "parents": [-1, 0, 0, 1, 1, 3],
    "texts": ["The", " cat", " <dog>", " sat", " ran\n", " on"],
    "confidences": [1.0, 0.62, 0.21, 0.999, 0.1, 0.33],
    "path": [1, 3],
    "bonus": " down",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory, target_path, head_path) -> dict:
    folder = tmp_path_factory.mktemp("page")
    config = evaluation(folder, target_path, head_path)
    return evaluate(replace(config, baselines=["prompt_lookup"], tree="dynamic"))


@pytest.fixture(scope="module")
def html(report) -> str:
    return (Path(report["out"]) / "report.html").read_text(encoding="utf-8")


def test_the_page_needs_no_other_file_and_no_network(html):
    assert not re.search(r"https?://(?!www\.w3\.org)", html)
    sources = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert sources and all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    for source in sources:
        picture = base64.b64decode(source.partition(",")[2]).decode()
        assert "<svg" in picture and "<image" not in picture
    assert "<script" not in html and "@import" not in html and "url(" not in html


def test_the_page_shows_the_reports_figures(report, html):
    reader = Page()
    reader.feed(re.sub(r"<(meta|img|path|rect)[^>]*>", "", html))
    text = " ".join(piece for _, piece in reader.pieces)
    overall = report["overall"]
    for figure in (
        f"{overall['acceptance_length']:.2f}",
        f"{overall['speedup']:.2f}x",
        f"{report['outputs_equal']} / {overall['answers']}",
        f"{report['calibration']['expected_calibration_error']:.3f}",
        f"{overall['baselines']['prompt_lookup']['acceptance_length']:.3f}",
        report["fingerprint"]["weights"],
        report["machine"]["torch"],
        f"--speculative-num-draft-tokens {report['best_tree']['speculative_num_draft_tokens']}",
    ):
        assert figure in text, figure
    for name, one in report["sets"].items():
        assert name in text and f"{one['acceptance_length']:.3f}" in text


def test_pictures_are_there_for_every_question(html):
    names = set(re.findall(r'alt="([^"]*)"', html))
    assert names == {
        "Acceptance by draft step",
        "Tokens per round",
        "Milliseconds per token by phase",
        "Acceptance against confidence",
        "Expected speed-up by batch size",
        "Cost of a forward by its tokens",
    }
    assert 1 <= html.count('<svg class="tree"') <= 3


def test_the_same_report_gives_the_same_page(report, html):
    assert page(report) == html


def test_what_the_texts_of_prompts_and_targets_hold_is_no_markup(report, tmp_path):
    evil = "<b onload=x>&"
    changed = report | {
        "sets": {evil: next(iter(report["sets"].values())), **report["sets"]},
        "fingerprint_differences": [f"weights: {evil}"],
        "trees": [
            TREE | {"set": evil, "prompt": evil, "turn": 1, "round": 1, "context": evil},
        ],
    }
    text = page(changed)
    assert evil not in text and "&lt;b onload=x&gt;&amp;" in text
    assert "Not the target this head was trained for" in text


def test_a_tree_is_drawn_with_its_accepted_path():
    svg = tree_svg(TREE)
    assert svg.count('class="node accepted"') == 2 and svg.count('class="node refused"') == 3
    assert svg.count('class="edge accepted"') == 2 and svg.count('class="edge bonus"') == 1
    words = re.findall(r'<text class="word (\w+)"[^>]*>([^<]*)<', svg)
    assert ("accepted", "␣cat") in words and ("refused", "␣ran⏎") in words
    assert ("refused", "␣&lt;dog&gt;") in words and ("bonus", "␣down") in words
    assert ">62%<" in svg and ">100%<" in svg


def test_the_accepted_path_runs_on_one_line_and_no_two_nodes_overlap():
    svg = tree_svg(TREE)
    boxes = [
        (kind, float(x), float(y), float(width))
        for kind, x, y, width in re.findall(
            r'<rect class="node (\w+)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"', svg
        )
    ]
    line = {y for kind, _, y, _ in boxes if kind in ("root", "accepted", "bonus")}
    assert len(line) == 1
    for i, (_, x, y, width) in enumerate(boxes):
        for _, other_x, other_y, other_width in boxes[i + 1 :]:
            apart = x + width <= other_x or other_x + other_width <= x
            assert apart or abs(y - other_y) >= 20


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(None, "every batch size up to 64"), (1, "does not pay"), (8, "stops paying at batch size 8")],
)
def test_the_text_says_where_speculation_stops_paying(stop, expected):
    sizes = [{"batch_size": size} for size in (1, 8, 64)]
    assert expected in pays_text({"stops_paying_at": stop, "by_batch_size": sizes})


def test_the_table_shows_the_figures_and_how_they_are_counted(report):
    text, overall = table(report), report["overall"]
    assert f"{overall['acceptance_length']:.3f}" in text
    assert f"{overall['accepted'][1]} of {overall['tried'][1]} at step 2" in text
    assert "τ = 1 + accepted / rounds" in text
    assert "expected calibration error" in text
    tables = [line for line in text.splitlines() if "  " in line and "/" not in line]
    assert max(map(len, tables)) <= 120


def test_differences_are_counted_and_shown(report, tmp_path):
    gaps = {"logit_gap": 1e-6, "rounding": 2e-6, "near_tie": True}
    place = {"set": "chat", "prompt": "b", "turn": 1, "position": 7}
    changed = report | {"outputs_equal": 5, "differences": [place | gaps]}
    write_report(changed, tmp_path)
    text = (tmp_path / "report.txt").read_text()
    assert "5 of 6 answers equal plain decoding; of the others 1 are near-ties" in text
    assert "chat b turn 1, token 7: near-tie, logits 1e-06 apart where rounding moves them" in text


@pytest.mark.parametrize(
    ("drafted", "reason"),
    [([1, 2, 9, 4], "drawn otherwise, or of a quantised target"), ([1, 2], "one answer ends")],
)
def test_a_difference_that_is_not_looked_into_is_shown_as_such(report, drafted, reason):
    difference = first_difference([1, 2, 3], drafted)
    assert difference["position"] == 2
    place = {"set": "chat", "prompt": "b", "turn": 1}
    text = table(report | {"outputs_equal": 5, "differences": [place | difference]})
    assert f"chat b turn 1, token 2: {reason}" in text
    assert first_difference([1, 2], [1, 2]) is None
