"""Each family of targets in real vLLM: what the table says is what happens."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from data.files import write_json
from data.targets.families import FAMILIES
from data.targets.vllm_environment import vllm_environment
from tests.runs import save_tiny_run
from tests.targets import load, randomise_norms
from tests.test_target_vllm import engine_config, needs_vllm
from tests.tiny import save_tiny_target
from train.config import ExportConfig
from train.decode import plain_generate
from train.serve.check_parity import parity
from train.serve.engine_vllm import Request
from train.serve.export import export, load_exported
from train.serve.families import NO, RAN, SERVED, table, unserved
from train.serve.target_facts import sliding_window

ONLY = [name for name in os.environ.get("FAMILIES", "").split(",") if name] or sorted(FAMILIES)
PROMPTS = [[1, *range(40, 60)], [1, *range(90, 99)]]


@pytest.fixture(scope="module")
def answered(tmp_path_factory) -> Path:
    """A folder for each family, with a target, a head, and what vLLM did with them."""
    root = tmp_path_factory.mktemp("families")
    folders = []
    for family in ONLY:
        folder = root / family
        target = randomise_norms(save_tiny_target(folder / "target", engine_config(family)))
        head = export(ExportConfig(checkpoint=str(save_tiny_run(folder / "run", target))))
        request = Request(
            model=str(target), revision=None, trust_remote_code=False, dtype="float32",
            head=str(head), num_steps=2, sets=[PROMPTS], max_new_tokens=8, stop_ids=[],
            max_model_len=64, parity=str(folder / "parity.safetensors"),
        )  # fmt: skip
        write_json(folder / "request.json", asdict(request))
        folders.append(str(folder))
    command = [sys.executable, "-m", "tests.vllm_families", *folders]
    environment = {**os.environ, **vllm_environment(folders[0]), "VLLM_CPU_KVCACHE_SPACE": "1"}
    subprocess.run(
        command, env=environment, check=True, timeout=3000, cwd=Path(__file__).parents[1]
    )
    return root


def test_the_table_has_every_family_that_the_dump_accepts():
    assert SERVED.keys() == FAMILIES.keys()


@pytest.mark.engine
@needs_vllm
@pytest.mark.parametrize("family", ONLY)
def test_vllm_serves_a_head_of_each_family_as_the_table_says(answered, family):
    folder, row = answered / family, SERVED[family]
    if row.vllm != RAN:
        assert row.error and row.error in (folder / "error.txt").read_text()
        return
    assert not (folder / "error.txt").exists(), (folder / "error.txt").read_text()[-2000:]
    result = json.loads((folder / "result.json").read_text())
    target = load(folder / "target")
    for prompt, answer in zip(PROMPTS, result["tokens"][0], strict=True):
        plain = plain_generate(target, torch.tensor(prompt), max_new_tokens=8, stop_ids=())
        assert answer == plain.tokens
    assert result["counters"][0]["drafts"] > 0  # it did draft
    seen = load_file(folder / "parity.safetensors")
    features = target.features(torch.tensor([PROMPTS[0]]))[0]
    assert_close(seen["features"], features, rtol=1e-2, atol=1e-2)
    head, _ = load_exported(folder / "run" / "export" / "vllm")
    target_rows = target.head.embed_tokens
    window = sliding_window(target.model.config)
    file = folder / "parity.safetensors"
    report = parity(file, head, target_rows, torch.float32, window=window)
    assert report["close"] and report["positions_equal"], report
    # Behind the end of such a window vLLM's head is another one: the note of the table's readers.
    if window is not None:
        assert not parity(file, head, target_rows, torch.float32)["close"]


def test_a_family_that_is_not_served_says_why_and_only_then():
    for name, row in SERVED.items():
        assert (row.vllm == NO) == bool(unserved("vllm", name)) == bool(row.error), name
        assert (row.sglang == NO) == bool(unserved("sglang", name)), name
        assert unserved("eagle", name) is None
    assert all(f"| {name} | " in table() for name in FAMILIES)


def test_architectures_are_those_of_the_families():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    assert {name: row.architecture for name, row in SERVED.items()} == {
        name: NAMES[name] for name in SERVED
    }
