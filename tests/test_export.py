import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import Gemma2Config, Qwen3Config

from data.config import TargetConfig
from tests.runs import export_tiny, save_tiny_run, set_dtype
from tests.tiny import save_tiny_target, tiny_llama_config
from train.config import ExportConfig
from train.head import DraftHead, draft_config
from train.serve.export import export, load_exported, serve_command

LAYER_TENSORS = {
    "fc.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.v_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.mlp.down_proj.weight",
    "layers.0.post_attention_layernorm.weight",
}
TINY = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("engine", "names"),
    [("vllm", LAYER_TENSORS), ("sglang", LAYER_TENSORS | {"fc.bias"})],
)
def test_an_export_holds_exactly_the_tensors_that_the_engine_loads(run_path, engine, names):
    out = export(ExportConfig(checkpoint=str(run_path), engine=engine))

    tensors = load_file(out / "model.safetensors")
    assert out == run_path / "export" / engine
    assert tensors.keys() == names
    assert [f.name for f in out.glob("*.safetensors")] == ["model.safetensors"]
    if engine == "sglang":
        assert tensors["fc.bias"].shape == (32,)
        assert not tensors["fc.bias"].any()


def test_config_json_holds_exactly_the_keys_that_vllm_needs(tmp_path):
    _, _, keys = export_tiny(tmp_path)

    assert keys == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": 259,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
        "bias": False,
    }


@pytest.mark.parametrize("tied", [True, False])
def test_sglang_heads_are_never_tied_and_name_their_own_class(tmp_path, tied):
    _, _, keys = export_tiny(tmp_path, engine="sglang", tie_word_embeddings=tied)

    assert keys["architectures"] == ["LlamaForCausalLMEagle"]
    assert keys["tie_word_embeddings"] is False
    assert not keys.keys() & {"bias", "attention_bias", "mlp_bias"}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_the_trained_ones_rounded_once(tmp_path, engine, dtype):
    target = save_tiny_target(tmp_path / "target", tiny_llama_config())
    set_dtype(target, dtype)
    run = save_tiny_run(tmp_path / "run", target)

    out = export(ExportConfig(checkpoint=str(run), engine=engine))

    trained = load_file(run / "steps" / "000020" / "head.safetensors")
    exported = load_file(out / "model.safetensors")
    for name, tensor in trained.items():
        assert torch.equal(exported[name], tensor.to(dtype)), name
    keys = json.loads((out / "config.json").read_text())
    assert keys["torch_dtype"] == str(dtype).removeprefix("torch.")


def test_a_loaded_export_computes_what_the_trained_head_computes(run_path):
    out = export(ExportConfig(checkpoint=str(run_path)))
    head, record = load_exported(out)

    trained = DraftHead(head.config)
    trained.load_state_dict(load_file(run_path / "steps" / "000020" / "head.safetensors"))
    inputs = torch.randn(2, 40, 32)
    assert_close(head(*inputs, [25, 15]), trained(*inputs, [25, 15]), rtol=0, atol=0)
    assert record["engine"] == "vllm"
    assert record["step"] == 20
    assert record["acceptance"]["acceptance_length"] == 1.5
    assert record["settings"]["loss"] == {"ce_weight": 0.1}
    assert record["fingerprint"]["model_type"] == "llama"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_large_rope_theta_survives_in_both_spellings(tmp_path, engine):
    _, _, keys = export_tiny(
        tmp_path, engine=engine, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    )

    assert keys["rope_theta"] == 1e6
    assert keys["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}
    assert "rope_scaling" not in keys


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_llama3_rope_scaling_survives_in_both_spellings(tmp_path, engine):
    out, _, keys = export_tiny(tmp_path, engine=engine, rope_parameters=LLAMA3)

    assert keys["rope_parameters"] == LLAMA3
    assert keys["rope_theta"] == 500000.0
    assert keys["rope_scaling"] == {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    plain = DraftHead(draft_config(tiny_llama_config()))
    assert not torch.equal(load_exported(out)[0].rotary.inv_freq, plain.rotary.inv_freq)


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_either_rope_spelling_alone_gives_the_same_head(tmp_path, spelling):
    """Transformers 4 reads rope_theta and rope_scaling, 5 reads rope_parameters."""
    out, _, keys = export_tiny(tmp_path, rope_parameters=LLAMA3)
    both, _ = load_exported(out)
    for key in {"rope_parameters", "rope_scaling"} - {spelling}:
        del keys[key]
    (out / "config.json").write_text(json.dumps(keys))

    assert torch.equal(load_exported(out)[0].rotary.inv_freq, both.rotary.inv_freq)


def test_the_head_of_a_qwen_target_is_a_llama_layer_with_qwens_rope(tmp_path):
    config = Qwen3Config(
        **{k: v for k, v in tiny_llama_config().to_dict().items() if k in TINY},
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    run = save_tiny_run(tmp_path / "run", save_tiny_target(tmp_path / "target", config))

    out = export(ExportConfig(checkpoint=str(run)))

    keys = json.loads((out / "config.json").read_text())
    assert keys["architectures"] == ["LlamaForCausalLM"]
    assert keys["model_type"] == "llama"
    assert keys["rope_theta"] == 1e6
    assert keys["max_position_embeddings"] == 512
    assert "`qwen3` model" in (out / "README.md").read_text()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_target_that_the_engine_cannot_draft_for_is_named(tmp_path, caplog, engine):
    config = Gemma2Config(
        **{k: v for k, v in tiny_llama_config().to_dict().items() if k in TINY},
        final_logit_softcapping=30.0,
    )
    run = save_tiny_run(tmp_path / "run", save_tiny_target(tmp_path / "target", config))

    out = export(ExportConfig(checkpoint=str(run), engine=engine))

    assert "no drafting for gemma2 targets" in caplog.text
    keys = json.loads((out / "config.json").read_text())
    assert keys.get("final_logit_softcapping") == (30.0 if engine == "sglang" else None)


def test_a_head_dim_that_is_not_hidden_over_heads_survives(tmp_path):
    out, _, keys = export_tiny(tmp_path, head_dim=16)

    assert keys["head_dim"] == 16
    assert load_file(out / "model.safetensors")["layers.0.self_attn.o_proj.weight"].shape == (
        32,
        64,
    )


def test_the_card_holds_acceptance_recipe_fingerprint_and_serve_command(run_path, target_path):
    for engine in ("vllm", "sglang"):
        out = export(ExportConfig(checkpoint=str(run_path), engine=engine))
        card = (out / "README.md").read_text()
        assert serve_command(out, str(target_path), engine) in card
        assert "τ = 1.50" in card and "α_1 = 0.400" in card and "bonus token included" in card
        assert "| `lr` | `0.001` |" in card and "| `loss.ce_weight` | `0.1` |" in card
        assert load_exported(out)[1]["fingerprint"]["weights"] in card
        assert "not `eagle3`" in card and "Llama-shaped by design" in card


def test_the_serve_command_names_float32_because_engines_would_halve_it(tmp_path):
    out, _, keys = export_tiny(tmp_path)
    assert "--dtype float32" in serve_command(out, "some/target", "vllm")
    (out / "config.json").write_text(json.dumps(keys | {"torch_dtype": "bfloat16"}))
    assert "--dtype" not in serve_command(out, "some/target", "vllm", num_steps=5)
    assert '"num_speculative_tokens": 5' in serve_command(out, "some/target", "vllm", num_steps=5)


def test_a_folder_with_foreign_files_is_left_alone(run_path, tmp_path):
    (tmp_path / "optimizer.bin").write_bytes(b"x")

    with pytest.raises(ValueError, match=r"files that no export wrote: optimizer\.bin"):
        export(ExportConfig(checkpoint=str(run_path), out=str(tmp_path)))

    assert [f.name for f in tmp_path.iterdir()] == ["optimizer.bin"]


def test_an_export_replaces_an_older_one_whole(run_path, tmp_path):
    first = export(ExportConfig(checkpoint=str(run_path), engine="sglang", out=f"{tmp_path}/out"))
    second = export(ExportConfig(checkpoint=str(run_path), engine="vllm", out=f"{tmp_path}/out"))

    assert first == second
    assert load_file(second / "model.safetensors").keys() == LAYER_TENSORS


def test_another_target_is_refused_with_the_fields_that_differ(run_path, tmp_path):
    other = save_tiny_target(tmp_path / "other", seed=7)

    elsewhere = TargetConfig(path=str(other))
    with pytest.raises(ValueError, match=r"is not the target that .* was trained for: weights"):
        export(ExportConfig(checkpoint=str(run_path), target=elsewhere, out=f"{tmp_path}/out"))

    assert not (tmp_path / "out").exists()


def test_a_target_that_has_moved_is_found_where_the_user_says(run_path, target_path, tmp_path):
    moved = shutil.copytree(target_path, tmp_path / "moved")

    target = TargetConfig(path=str(moved))
    out = export(ExportConfig(checkpoint=str(run_path), target=target, out=f"{tmp_path}/out"))

    assert serve_command(out, str(moved), "vllm") in (out / "README.md").read_text()


def test_weights_that_overflow_the_targets_dtype_are_not_exported(tmp_path):
    target = save_tiny_target(tmp_path / "target")
    set_dtype(target, torch.float16)
    run = save_tiny_run(tmp_path / "run", target)
    weights = run / "steps" / "000020" / "head.safetensors"
    tensors = load_file(weights)
    tensors["fc.weight"][0, 0] = 1e6
    save_file(tensors, weights)

    with pytest.raises(ValueError, match=r"fc\.weight holds values that are not finite"):
        export(ExportConfig(checkpoint=str(run)))

    assert not (run / "export" / "vllm").exists()
