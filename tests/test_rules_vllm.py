"""What the rules say of tensors is what vLLM's own loader does with them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.targets.vllm_environment import vllm_environment
from tests.runs import save_tiny_run
from tests.test_target_vllm import engine_config, needs_vllm
from tests.test_validate import ATTENTION, MLP, NORM, Break, add, drop, rename
from tests.tiny import save_tiny_target
from train.config import ExportConfig
from train.serve.export import export
from train.serve.rules import REFUSED, RULES


def rows(name: str, count: int) -> Break:
    """Give a tensor more or fewer rows than the config says."""

    def change(tensors, keys, facts):
        old = tensors[name]
        tensors[name] = torch.cat([old, old])[: len(old) + count].clone()

    return change


def nothing(tensors, keys, facts):
    pass


CASES = {
    "sound": ("sound", nothing),
    "prefix": ("prefix", rename("", "model.")),
    "layer-name": ("layer-name", rename("layers.0", "layers.32")),
    "extra-layer": ("extra-layer", add("layers.1.mlp.up_proj.weight", 64, 64)),
    "missing-fc": ("missing-fc", drop("fc.weight")),
    "missing-attention": ("missing-attention", drop(f"{ATTENTION}k_proj.weight")),
    "missing-mlp": ("missing-mlp", drop(f"{MLP}down_proj.weight")),
    "missing-norm": ("missing-norm", drop(NORM)),
    "fc-bias-zero": ("fc-bias-zero", add("fc.bias", 64, value=0.0)),
    "fc-bias-used": ("fc-bias-used", add("fc.bias", 64)),
    "qkv-bias": ("qkv-bias", add(f"{ATTENTION}q_proj.bias", 64)),
    "unknown-bias": ("unknown-bias", add(f"{ATTENTION}o_proj.bias", 64)),
    "output-head": ("output-head", add("lm_head.weight", 259, 64)),
    "final norm": ("extra-norm", add("norm.weight", 64)),
    "input norm": ("extra-norm", add("layers.0.input_layernorm.weight", 64)),
    "eagle3": ("eagle3", add("d2t", 259)),
    "rope-buffer": ("rope-buffer", add("layers.0.self_attn.rotary_emb.inv_freq", 16)),
    "unknown-tensor": ("unknown-tensor", add("projector.weight", 64)),
    "too many rows": ("truncated", rows(f"{MLP}gate_proj.weight", 8)),
    "too many heads": ("truncated", rows(f"{ATTENTION}k_proj.weight", 32)),
    "too few rows": ("padded", rows(f"{MLP}gate_proj.weight", -8)),
    "fc of another shape": ("wrong-shape", rows("fc.weight", 8)),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> dict[str, str | None]:
    root = tmp_path_factory.mktemp("loader")
    target = save_tiny_target(root / "target", engine_config("llama"))
    head = export(ExportConfig(checkpoint=str(save_tiny_run(root / "run", target))))
    (root / "cases").mkdir()
    for name, (_, change) in CASES.items():
        tensors = load_file(head / "model.safetensors")
        change(tensors, {}, None)
        tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
        save_file(tensors, root / "cases" / f"{name}.safetensors")
    command = [sys.executable, "-m", "tests.vllm_loader", str(target), str(head)]
    result = subprocess.run(
        [*command, str(root / "cases")],
        env={**os.environ, **vllm_environment(str(target)), "VLLM_CPU_KVCACHE_SPACE": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-3000:]
    return json.loads((root / "cases" / "result.json").read_text())


@pytest.mark.engine
@needs_vllm
@pytest.mark.parametrize("name", CASES)
def test_vllms_loader_refuses_what_the_rules_say_and_takes_the_rest_silently(loaded, name):
    rule = CASES[name][0]
    effect = RULES[rule].vllm if rule != "sound" else None
    refused = effect is not None and effect[0] == REFUSED
    assert (loaded[name] is not None) == refused, loaded[name]
    if refused and "There is no module or parameter" in effect[1]:
        assert "There is no module or parameter named" in loaded[name]
