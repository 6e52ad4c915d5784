"""Heads in SGLang's own loader: a good one arrives bit for bit, a broken one never passes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.config import TargetConfig
from tests.runs import export_tiny, save_tiny_run, set_dtype
from tests.tiny import save_tiny_target, tiny_llama_config
from train.config import ExportConfig
from train.serve.engine_sglang import PYTHON, check_many, describe, find_python
from train.serve.export import export

needs_sglang = pytest.mark.skipif(
    not PYTHON.is_file(), reason="no SGLang: . scripts/setup.sh && setup_sglang"
)
LAYER = "layers.0."
Tensors = dict[str, Tensor]


def drop(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {k: v for k, v in tensors.items() if k != name}


def change(name: str, how: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: how(tensors[name]).contiguous()}


def rename(how: Callable[[str], str]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {how(k): v for k, v in tensors.items()}


def taller(x: Tensor) -> Tensor:
    return torch.cat([x, x[:4]])


# What is done to the tensors, and what the report must say.
DAMAGED_TENSORS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "prefix": (rename(lambda name: f"model.{name}"), "model.fc.weight is in the file, but"),
    "layer name": (
        rename(lambda name: name.replace("layers.0", "layer")),
        "qkv_proj.weight is never filled",
    ),
    "extra layer": (
        lambda t: t | {"layers.1.mlp.up_proj.weight": torch.ones(64, 32)},
        "layers.1.mlp.up_proj.weight is in the file, but",
    ),
    "input norm": (
        lambda t: t | {f"{LAYER}input_layernorm.weight": torch.ones(32)},
        "input_layernorm.weight is in the file, but",
    ),
    "no fc": (drop("fc.weight"), "model.fc.weight is never filled"),
    "no fc bias": (drop("fc.bias"), "model.fc.bias is never filled"),
    "no q": (drop(f"{LAYER}self_attn.q_proj.weight"), "qkv_proj.weight is never filled"),
    "no o": (drop(f"{LAYER}self_attn.o_proj.weight"), "o_proj.weight is never filled"),
    "no gate": (drop(f"{LAYER}mlp.gate_proj.weight"), "gate_up_proj.weight is never filled"),
    "no down": (drop(f"{LAYER}mlp.down_proj.weight"), "down_proj.weight is never filled"),
    "no norm": (
        drop(f"{LAYER}post_attention_layernorm.weight"),
        "post_attention_layernorm.weight is never filled",
    ),
    "q too big": (change(f"{LAYER}self_attn.q_proj.weight", taller), "cut or padded"),
    "k too small": (change(f"{LAYER}self_attn.k_proj.weight", lambda x: x[:8]), "cut or padded"),
    "up too big": (change(f"{LAYER}mlp.up_proj.weight", taller), "cut or padded"),
    "down too small": (change(f"{LAYER}mlp.down_proj.weight", lambda x: x[:, :60]), "cut or pad"),
    "fc transposed": (change("fc.weight", lambda x: x.T), "SGLang refuses the folder"),
    "fc bias too long": (change("fc.bias", taller), "SGLang refuses the folder"),
    "nan": (
        change("fc.weight", lambda x: x / 0),
        "fc.weight holds numbers that are not finite",
    ),
    "draft vocabulary": (lambda t: t | {"d2t": torch.zeros(8)}, "d2t is in the file, but"),
}
# What is changed in config.json (None: taken out), and what the report must say.
DAMAGED_CONFIGS: dict[str, tuple[dict, str]] = {
    "plain Llama": ({"architectures": ["LlamaForCausalLM"]}, "not an EAGLE head"),
    "unknown class": ({"architectures": ["NoSuchModel"]}, "SGLang refuses the folder"),
    "no class": ({"architectures": None}, "SGLang refuses the folder"),
    "no model type": ({"model_type": None}, "SGLang refuses the folder"),
    "no layer count": ({"num_hidden_layers": None}, "num_hidden_layers is 32, expected 1"),
    "hidden size": ({"hidden_size": 64}, "hidden_size is 64, the target's 32"),
    "vocabulary": ({"vocab_size": 100}, "vocab_size is 100, the target's 259"),
    "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings is True and must be false"),
    "no dtype": ({"torch_dtype": None}, "torch_dtype must be the target's"),
    "no rope": ({"rope_theta": None, "rope_parameters": None}, "RoPE's table differs"),
    "short": ({"max_position_embeddings": 64}, "SGLang refuses the folder"),
    "kv heads": ({"num_key_value_heads": 4}, "qkv_proj.weight [96, 32] was cut or padded"),
    "activation": ({"hidden_act": "gelu"}, "SGLang refuses the folder"),
    "epsilon": ({"rms_norm_eps": 1e-2}, "rms_norm_eps is 0.01, the target's 1e-06"),
}


def bfloat16_export(folder: Path, **changes) -> Path:
    """A head for a bfloat16 target: for a float32 one SGLang's own choice would be float16."""
    target = save_tiny_target(folder / "target", tiny_llama_config(**changes))
    set_dtype(target, torch.bfloat16)
    run = save_tiny_run(folder / "run", target)
    return export(ExportConfig(checkpoint=str(run), engine="sglang"))


def damaged(good: Path, folder: Path, tensors=None, config=None) -> Path:
    shutil.copytree(good, folder)
    weights = folder / "model.safetensors"
    if tensors:
        save_file(tensors(load_file(weights)), weights, metadata={"format": "pt"})
    keys = json.loads((folder / "config.json").read_text()) | (config or {})
    keys = {key: value for key, value in keys.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, dict]:
    """What SGLang, in one process, makes of the export and of every broken copy of it."""
    if not PYTHON.is_file():
        pytest.skip("no SGLang")
    root = tmp_path_factory.mktemp("heads")
    rope = {"rope_type": "default", "rope_theta": 50000.0}  # not what a missing key would mean
    good = bfloat16_export(root / "good", rope_parameters=rope)
    folders = {"good": good}
    for name, (tensors, _) in DAMAGED_TENSORS.items():
        folders[name] = damaged(good, root / name, tensors)
    for name, (config, _) in DAMAGED_CONFIGS.items():
        folders[name] = damaged(good, root / name, config=config)
    target = TargetConfig(path=str(root / "good" / "target"))
    found = check_many(list(folders.values()), target, out=root / "check")
    return dict(zip(folders, found, strict=True))


@pytest.mark.engine
@needs_sglang
def test_sglang_loads_our_export_bit_for_bit(reports):
    report = reports["good"]
    assert report["problems"] == [] and report["passed"]
    assert report["version"] == "0.5.23"
    compared = report["parameters"]
    assert all(found["equal"] for found in compared.values())
    tensors = {source for found in compared.values() for source in found["from"]}
    assert tensors == load_file(Path(report["folder"]) / "model.safetensors").keys()
    assert "7 of 7 parameters" in describe(report)


@pytest.mark.engine
@needs_sglang
@pytest.mark.parametrize("name", [*DAMAGED_TENSORS, *DAMAGED_CONFIGS])
def test_a_broken_head_does_not_pass_and_the_report_says_why(reports, name):
    report, expected = reports[name], (DAMAGED_TENSORS | DAMAGED_CONFIGS)[name][1]
    assert not report["passed"]
    assert any(expected in problem for problem in report["problems"]), report["problems"]


@pytest.mark.engine
@needs_sglang
def test_a_float32_head_is_compared_in_float32(tmp_path):
    """SGLang's own choice for a float32 target is float16: everything would look equal after it."""
    good, _, _ = export_tiny(tmp_path, engine="sglang")
    target = TargetConfig(path=str(tmp_path / "target"))
    [report] = check_many([good], target, out=tmp_path / "check")
    assert report["passed"] and report["dtype"] == "float32"


def test_a_missing_sglang_names_the_command_that_installs_it(tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)does not exist.*setup_sglang"):
        find_python(str(tmp_path / "python"))
