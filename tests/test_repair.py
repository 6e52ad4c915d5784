"""What is repaired equals what was never broken, bit for bit; the rest is said and not done."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.config import TargetConfig
from tests.heads import export_tiny, random_head, random_prompts, trained_head
from tests.targets import load
from tests.test_validate import (
    ATTENTION,
    Break,
    add,
    copied,
    drop,
    no_theta,
    rename,
    say,
)
from tests.tiny import save_tiny_target, tiny_llama_config
from train.config import CheckConfig, ExportConfig
from train.serve.export import export, load_exported
from train.serve.folder import read_folder
from train.serve.inspect_head import inspect_head
from train.serve.repair import repair
from train.serve.target_facts import target_facts
from train.serve.trial import Reading


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    config = tiny_llama_config(
        head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    )
    return save_tiny_target(tmp_path_factory.mktemp("target"), config)


@pytest.fixture(scope="module")
def exports(target, tmp_path_factory) -> dict[str, Path]:
    """A head that predicts some of the target's answers, exported for both engines."""
    folder, loaded = tmp_path_factory.mktemp("exports"), load(target)
    head = trained_head(loaded, random_prompts(loaded, [9, 14, 20, 30]), steps=30)
    first = export_tiny(head, loaded, folder)
    run = str(folder / "run")
    return {"vllm": first, "sglang": export(ExportConfig(checkpoint=run, engine="sglang"))}


def break_folder(source: Path, out: Path, target: Path, change: Break) -> Path:
    shutil.copytree(source, out)
    file, keys = out / "model.safetensors", json.loads((out / "config.json").read_text())
    tensors = load_file(file)
    change(tensors, keys, target_facts(TargetConfig(path=str(target))))
    save_file({name: t.contiguous() for name, t in tensors.items()}, file)
    (out / "config.json").write_text(json.dumps(keys))
    return out


def check(path: Path, target: Path, **settings) -> dict:
    values = {"run_target": False, **settings}
    return inspect_head(
        CheckConfig(path=str(path), target=TargetConfig(path=str(target)), **values)
    )


def all_at_once(tensors, keys, facts):
    rename("", "model.")(tensors, keys, facts)
    no_theta(tensors, keys, facts)
    say(tie_word_embeddings=True, num_hidden_layers=2, bias=True)(tensors, keys, facts)
    copied("model.embed_tokens.weight")(tensors, keys, facts)


def shards(tensors, keys, facts):
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    rename("layers.0", "layers.12")(tensors, keys, facts)


REPAIRABLE = {
    "prefix": rename("", "model."),
    "layer name and RoPE buffer": shards,
    "surplus or missing bias": lambda t, k, f: (
        drop("fc.bias") if "fc.bias" in t else add("fc.bias", 32, value=0.0)
    )(t, k, f),
    "zero bias of a layer": add(f"{ATTENTION}q_proj.bias", 64, value=0.0),
    "tied flag": say(tie_word_embeddings=True),
    "layer count": drop("num_hidden_layers"),
    "RoPE": no_theta,
    "head_dim": drop("head_dim"),
    "heads": drop("num_key_value_heads"),
    "width": say(intermediate_size=48),
    "vocabulary": drop("vocab_size"),
    "positions": say(max_position_embeddings=128),
    "dtype": drop("torch_dtype"),
    "bias flag": say(bias=True, attention_bias=True),
    "class": say(architectures=["Qwen2ForCausalLM"], model_type="qwen"),
    "copy of the embeddings": copied("embed_tokens.weight"),
    "copy of the output head": copied("lm_head.weight"),
    "all at once": all_at_once,
}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("fault", REPAIRABLE)
def test_a_repaired_folder_equals_the_original_bit_for_bit(
    exports, target, tmp_path, engine, fault
):
    broken = break_folder(exports[engine], tmp_path / "broken", target, REPAIRABLE[fault])
    before = {file.name: file.read_bytes() for file in broken.iterdir()}
    report = check(broken, target, engine=engine, fix=True, out=str(tmp_path / "fixed"))

    assert report["passed"] and report["repaired"]["done"] and not report["repaired"]["left"]
    for name in ("config.json", "model.safetensors", "eagle_head.json"):
        original = (exports[engine] / name).read_bytes()
        assert (tmp_path / "fixed" / name).read_bytes() == original, name
    assert before == {file.name: file.read_bytes() for file in broken.iterdir()}
    load_exported(tmp_path / "fixed")


def test_a_bin_of_half_precision_becomes_what_the_engine_takes(exports, target, tmp_path):
    tensors = load_file(exports["vllm"] / "model.safetensors")
    folder = tmp_path / "published"
    folder.mkdir()
    torch.save({f"model.{n}": t.half() for n, t in tensors.items()}, folder / "pytorch_model.bin")
    shutil.copy(exports["vllm"] / "config.json", folder)
    report = check(folder, target, engine="vllm", fix=True, out=str(tmp_path / "fixed"))
    assert report["passed"]
    fixed = load_file(tmp_path / "fixed" / "model.safetensors")
    assert all(torch.equal(fixed[name], t.half().float()) for name, t in tensors.items())
    assert not (tmp_path / "fixed" / "pytorch_model.bin").exists()


def test_swapped_halves_are_found_by_running_the_target_and_changed_back(
    exports, target, tmp_path, caplog
):
    caplog.set_level(logging.INFO, logger="train")

    def swap(tensors, keys, facts):
        tensors["fc.weight"] = tensors["fc.weight"].roll(32, dims=1)

    broken = break_folder(exports["vllm"], tmp_path / "broken", target, swap)
    report = check(broken, target, run_target=True)
    rules = {one["rule"] for one in report["findings"] if one["engine"] == "vllm"}
    assert rules == {"fc-halves", "altered-weights"} and not report["passed"]

    settings = {"run_target": True, "fix": True, "engine": "vllm"}
    assert check(broken, target, out=str(tmp_path / "fixed"), **settings)["passed"]
    for name in ("config.json", "model.safetensors", "eagle_head.json"):
        original = (exports["vllm"] / name).read_bytes()
        assert (tmp_path / "fixed" / name).read_bytes() == original
    assert "changed places" in caplog.text


@pytest.mark.parametrize("target_rope", [False, True])
def test_rope_that_was_said_is_kept_unless_the_targets_predicts_more(
    exports, target, tmp_path, target_rope
):
    def other(tensors, keys, facts):
        keys["rope_theta"] = keys["rope_parameters"]["rope_theta"] = 500.0

    broken = read_folder(break_folder(exports["vllm"], tmp_path / "broken", target, other))
    facts = target_facts(TargetConfig(path=str(target)))
    best = Reading(swapped=False, target_rope=target_rope)
    keys = repair(broken, facts, engine="vllm", best=best).folder.keys
    assert keys["rope_theta"] == (1e6 if target_rope else 500.0)


def test_a_sound_head_is_left_as_it_is(exports, target):
    report = check(exports["vllm"], target, run_target=True)
    assert report["verdicts"]["vllm"] == "loads" and report["passed"]
    assert len(report["readings"]) == 4
    assert report["readings"][0]["agreement"] > 0.1 > report["readings"][1]["agreement"]


def test_a_head_that_predicts_nothing_is_named(target, tmp_path):
    loaded = load(target)
    folder = export_tiny(random_head(loaded), loaded, tmp_path)
    report = check(folder, target, run_target=True, fix=True, out=str(tmp_path / "fixed"))
    assert "predicts-nothing" in {one["rule"] for one in report["findings"]}
    assert not report["passed"] and not (tmp_path / "fixed").exists()


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (drop("fc.weight"), "missing-fc"),
        (add("norm.weight", 32), "extra-norm"),
        (add("fc.bias", 32), "fc-bias-used"),
        (copied("embed_tokens.weight", 1.0), "own-embedding"),
        (add("lm_head.weight", 259, 32), "output-head"),
    ],
)
def test_what_cannot_be_repaired_is_named_and_nothing_is_written(
    exports, target, tmp_path, change, rule
):
    broken = break_folder(exports["vllm"], tmp_path / "broken", target, change)
    report = check(broken, target, engine="vllm", fix=True, out=str(tmp_path / "fixed"))
    assert not report["passed"]
    assert rule in {one["rule"] for one in report["repaired"]["left"]}
    assert not (tmp_path / "fixed").exists()


def test_a_bias_that_vllm_would_drop_is_kept_for_sglang(exports, target, tmp_path):
    broken = break_folder(exports["vllm"], tmp_path / "broken", target, add("fc.bias", 32))
    report = check(broken, target, engine="sglang", fix=True, out=str(tmp_path / "fixed"))
    assert report["passed"]
    assert load_file(tmp_path / "fixed" / "model.safetensors")["fc.bias"].eq(1).all()


def test_a_repair_never_goes_into_a_folder_that_is_there(exports, target, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match=r"there exists\. A repair goes into a new folder"):
        check(exports["vllm"], target, fix=True, out=str(tmp_path / "there"))
