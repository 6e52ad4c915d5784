"""The card and the serve command: what was measured, and who says so."""

from pathlib import Path

import pytest

from data.files import write_json
from tests.runs import save_tiny_run
from train.config import ExportConfig
from train.serve.export import export
from train.serve.model_card import measured_tree, serve_command, write_card

TREE = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 5,
    "speculative_eagle_topk": 4,
    "speculative_num_draft_tokens": 16,
}
CHAIN = TREE | {"speculative_num_steps": 2, "speculative_eagle_topk": 1}
CHAIN |= {"speculative_num_draft_tokens": 3}


@pytest.fixture
def run(tmp_path, target_path) -> Path:
    return save_tiny_run(tmp_path / "run", target_path)


def measure(folder: Path) -> None:
    """What `evaluate_head tree=auto` leaves in the folder."""
    (folder / "evaluation").mkdir()
    write_json(folder / "evaluation" / "report.json", {"best_tree": TREE, "best_chain": CHAIN})


@pytest.mark.parametrize(
    ("engine", "before", "after"),
    [
        ("vllm", '"num_speculative_tokens": 3', '"num_speculative_tokens": 2'),
        (
            "sglang",
            "num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
            "num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16",
        ),
    ],
)
def test_the_card_serves_with_the_tree_that_was_measured_best_and_says_which(
    run, target_path, engine, before, after
):
    out = export(ExportConfig(checkpoint=str(run), engine=engine))
    card = (out / "README.md").read_text()
    assert before in card and "a usual start, not measured" in card

    measure(out)
    write_card(out, str(target_path))

    card = (out / "README.md").read_text()
    assert after in card and "fastest of those tried" in card and before not in card
    assert serve_command(out, str(target_path), engine, tree=measured_tree(out)) in card


def test_what_was_measured_stays_with_the_same_weights_and_goes_with_others(run, target_path):
    config = ExportConfig(checkpoint=str(run), engine="sglang")
    out = export(config)
    measure(out)
    assert (export(config) / "evaluation" / "report.json").is_file()
    assert "--speculative-eagle-topk 4" in (out / "README.md").read_text()

    other = save_tiny_run(run.with_name("other"), target_path)
    weights = other / "steps" / "000020" / "head.safetensors"
    data = bytearray(weights.read_bytes())
    data[-4:] = b"\x00\x00\x80\x3f"
    weights.write_bytes(data)
    export(ExportConfig(checkpoint=str(other), engine="sglang", out=str(out)))
    assert not (out / "evaluation").exists()
    assert "--speculative-eagle-topk 1" in (out / "README.md").read_text()
