"""A head beside another fine-tune, a quantised copy or another template: warned of by field."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.config import TargetConfig
from tests.runs import save_tiny_run
from tests.tiny import save_tiny_target
from train.config import CheckConfig, EvaluateConfig, ExportConfig
from train.measure.evaluate import evaluate
from train.serve.export import export
from train.serve.inspect_head import inspect_head


@pytest.fixture(scope="module")
def head(tmp_path_factory) -> tuple[Path, Path]:
    """A target and a head that was exported for it."""
    folder = tmp_path_factory.mktemp("head")
    target = save_tiny_target(folder / "target")
    return target, export(ExportConfig(checkpoint=str(save_tiny_run(folder / "run", target))))


def fine_tune(target: Path) -> None:
    tensors = load_file(target / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] += 0.01
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def quantise(target: Path) -> None:
    file = target / "config.json"
    keys = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    file.write_text(json.dumps(keys))
    tensors = load_file(target / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def other_template(target: Path) -> None:
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        file = target / name
        if file.is_file():
            file.write_text(file.read_text().replace("Be brief.", "Be long."))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (fine_tune, "weights: "),
        (quantise, "quantization: fp8 8-bit here, none there (none is full precision"),
        (other_template, "chat_template: "),
        (lambda target: None, None),
    ],
    ids=["another fine-tune", "a quantised copy", "another template", "the same"],
)
def test_looking_at_a_head_names_the_field_in_which_the_target_differs(
    head, tmp_path, caplog, change, field
):
    target, folder = head
    caplog.set_level(logging.INFO, logger="train")
    copy = shutil.copytree(target, tmp_path / "copy")
    change(copy)

    config = TargetConfig(path=str(copy))
    inspect_head(CheckConfig(path=str(folder), target=config, run_target=False))

    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    if field is None:
        assert not warnings
    else:
        assert any(f"trained for another target: {field}" in line for line in warnings)


@pytest.mark.parametrize(
    ("change", "field"), [(fine_tune, "weights"), (other_template, "chat_tem")]
)
def test_evaluating_a_head_names_the_field_in_which_the_target_differs(
    head, tmp_path, caplog, change, field
):
    target, folder = head
    caplog.set_level(logging.INFO, logger="train")
    copy = shutil.copytree(target, tmp_path / "copy")
    change(copy)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "a cat"}) + "\n")

    report = evaluate(
        EvaluateConfig(
            head=str(folder),
            target=TargetConfig(path=str(copy), device="cpu"),
            prompts=str(prompts),
            max_new_tokens=4,
            out=str(tmp_path / "out"),
        )
    )

    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any(field in line and "trained for" in line for line in warnings)
    assert [line for line in report["fingerprint_differences"] if line.startswith(field)]
