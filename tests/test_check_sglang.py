import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from data.config import TargetConfig
from data.targets.model import load_target
from tests.heads import export_tiny, random_prompts, trained_head
from tests.tiny import save_tiny_target
from train.config import CheckConfig
from train.serve.check_sglang import check_sglang, drafting_of, is_for_sglang, tree_paths
from train.serve.engine_sglang import PYTHON

ROOT = Path(__file__).parent.parent
needs_sglang = pytest.mark.skipif(
    not PYTHON.is_file(), reason="no SGLang: . scripts/setup.sh && setup_sglang"
)
QUESTIONS = ["Who sees the red cat?", "What does the dog say?", "Rain or sun?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny target, an export of a head that accepts some of its guesses, and prompts."""
    folder = tmp_path_factory.mktemp("check")
    path = save_tiny_target(folder / "target")
    target = load_target(TargetConfig(path=str(path), device="cpu"))
    head = trained_head(target, random_prompts(target, [9, 30]), steps=60)
    export_tiny(head, target, folder, engine="sglang")
    lines = (json.dumps({"prompt": question}) for question in QUESTIONS)
    (folder / "questions.jsonl").write_text("\n".join(lines))
    return folder


def config(folder: Path, **changes) -> CheckConfig:
    values = dict(
        head=str(folder / "run" / "export" / "sglang"),
        target=TargetConfig(path=str(folder / "target"), device="cpu"),
        engine="sglang",
        max_new_tokens=12,
    )
    return CheckConfig(**{**values, **changes})


@pytest.mark.engine
@needs_sglang
def test_an_export_is_loaded_and_decoded_as_we_do(folder, tmp_path):
    settings = dict(num_steps=3, topk=3, num_draft_tokens=8)
    prompts = str(folder / "questions.jsonl")
    report = check_sglang(config(folder, prompts=prompts, out=str(tmp_path), **settings))
    assert report["passed"] and report["loaded"]["passed"] and not report["differences"]
    [check] = report["checks"]
    assert check["counters_equal"] and check["prompts"] == 3
    assert check["equal_trees"] == check["rounds"] > 3
    assert json.loads((tmp_path / "report.json").read_text())["passed"]


@pytest.mark.engine
@needs_sglang
def test_a_broken_folder_ends_the_command_with_1_and_says_what_is_missing(folder, tmp_path):
    weights = folder / "run" / "export" / "sglang" / "model.safetensors"
    whole = weights.read_bytes()
    tensors = load_file(weights)
    del tensors["fc.bias"]
    save_file(tensors, weights, metadata={"format": "pt"})
    command = [sys.executable, "-m", "scripts.check_export", "engine=sglang"]
    command += [f"head={weights.parent}", f"target={folder / 'target'}", f"out={tmp_path}"]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    finally:
        weights.write_bytes(whole)
    assert ended.returncode == 1, ended.stderr
    assert "model.fc.bias is never filled: the file has no fc.bias" in ended.stdout
    assert "FAILED" in ended.stdout and "Traceback" not in ended.stderr


def test_a_missing_sglang_is_one_message(folder, tmp_path):
    settings = dict(out=str(tmp_path), sglang_python=str(tmp_path / "nix"))
    with pytest.raises(RuntimeError, match=r"There is no SGLang: .*nix does not exist"):
        check_sglang(config(folder, **settings))


def test_a_python_without_sglang_is_named(folder, tmp_path):
    """This suite's own Python stands for one that somebody gave by mistake."""
    settings = dict(out=str(tmp_path), sglang_python=sys.executable)
    with pytest.raises(RuntimeError, match="has no SGLang"):
        check_sglang(config(folder, **settings))


def test_the_export_says_which_engine_it_is_for(folder):
    assert is_for_sglang(config(folder, engine=None, prompts="x"))
    assert is_for_sglang(config(folder))
    assert not is_for_sglang(config(folder, engine="vllm", prompts="x"))


def test_above_one_child_a_node_the_drafts_are_trees_with_sglangs_quirk(folder):
    assert drafting_of(config(folder), 3).tree == "chain"
    tree = drafting_of(config(folder, topk=4, num_draft_tokens=10), 4)
    assert (tree.tree, tree.ancestors, tree.num_draft_tokens) == ("dynamic", "rank", 10)


def test_a_node_whose_parent_is_not_in_the_tree_is_no_part_of_it():
    assert tree_paths([7, 5, 6, 8], [-1, 0, 0, 1]) == {(7,), (7, 5), (7, 6), (7, 5, 8)}
    assert tree_paths([7, 5, 6, 8], [-1, 0, -1, 2]) == {(7,), (7, 5)}
