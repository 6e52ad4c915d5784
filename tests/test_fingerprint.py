"""What the fingerprint of a target says, and how a difference reads."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from data.config import TargetConfig
from data.targets.model import fingerprint, fingerprint_differences
from tests.gguf_files import save_gguf

COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
    "ignore": ["lm_head"],
}


def read(folder: Path) -> dict[str, str]:
    return fingerprint(TargetConfig(path=str(folder)))


@pytest.fixture
def copy(target_path, tmp_path) -> Path:
    return Path(shutil.copytree(target_path, tmp_path / "copy"))


def test_the_fingerprint_names_what_differs(target_path, copy):
    ours = read(target_path)
    assert fingerprint_differences(ours, read(copy)) == []

    state = load_file(copy / "model.safetensors")
    state["model.layers.1.self_attn.q_proj.weight"] += 0.01  # as a merged adapter does
    save_file(state, copy / "model.safetensors", metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.chat_template += " "
    tokenizer.save_pretrained(copy)

    differences = fingerprint_differences(ours, read(copy))
    assert [line.split(":")[0] for line in differences] == ["weights", "chat_template"]
    assert "here" in differences[0] and "there" in differences[0]


@pytest.mark.parametrize("part", ["model.embed_tokens.weight", "model.norm.weight"])
def test_a_change_of_embedding_or_norm_shows(part, target_path, copy):
    state = load_file(copy / "model.safetensors")
    state[part][:1] *= 2
    save_file(state, copy / "model.safetensors", metadata={"format": "pt"})
    assert read(copy)["weights"] != read(target_path)["weights"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq 4-bit"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "gptq 8-bit"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8 8-bit"),
        ({"quant_method": "mxfp4"}, "mxfp4 4-bit"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes 4-bit"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes 8-bit"),
        (COMPRESSED, "compressed-tensors 4-bit"),
        ({"quant_method": "torchao", "quant_type": {}}, "torchao"),
        (None, "none"),
    ],
)
def test_the_fingerprint_says_how_the_weights_are_quantised(settings, words, copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    assert read(copy)["quantization"] == words


def test_the_fingerprint_says_how_a_gguf_file_is_quantised(target_path, tmp_path):
    assert read(save_gguf(target_path, tmp_path / "a.gguf", "Q8_0"))["quantization"] == "gguf Q8_0"


def test_a_quantised_copy_is_told_from_the_whole_one_in_words_and_first(target_path, copy):
    config = json.loads((copy / "config.json").read_text())
    settings = {"quant_method": "awq", "bits": 4}
    (copy / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))

    first, second = fingerprint_differences(read(target_path), read(copy))
    assert first.startswith("quantization: none here, awq 4-bit there (none is full precision")
    assert "dump with the one that is served" in first
    assert second.startswith("config:")
