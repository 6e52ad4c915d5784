"""Features, output head and fingerprint of real tiny models of every family."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from data.config import TargetConfig
from data.families import FAMILIES as KNOWN_FAMILIES
from data.target import (
    Target,
    TargetHead,
    check_output_head,
    load_target,
    read_target_head,
)
from tests.tiny import save_tiny_target

SIZES = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
# model_type -> what differs from SIZES; scales and caps strong enough to move every logit
FAMILIES: dict[str, dict] = {
    "apertus": {},
    "cohere": {"logit_scale": 0.0625},
    "cohere2": {"logit_scale": 0.0625, "sliding_window": 8},
    "ernie4_5": {},
    "exaone4": {"sliding_window": 8},
    "gemma": {},
    "gemma2": {"final_logit_softcapping": 1.5, "attn_logit_softcapping": 0.5, "sliding_window": 8},
    "gemma3_text": {"sliding_window": 8},
    "glm4": {},
    "glm4_moe": {"n_routed_experts": 4, **EXPERTS},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 8, **EXPERTS},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0},
    "llama": {},
    "mistral": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 4, **EXPERTS},
    "olmo2": {},
    "olmo3": {"sliding_window": 8},
    "phi3": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 16, **EXPERTS},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, **EXPERTS},
    "seed_oss": {},
    "smollm3": {},
}


def family_config(model_type: str) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, **{**SIZES, **FAMILIES[model_type]})


def wrapped_config(model_type: str) -> PretrainedConfig:
    """An image-text model, of which only the text part is used."""
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = {**SIZES, "sliding_window": 8}
    if model_type == "mistral3":
        text["model_type"] = "mistral"
    return AutoConfig.for_model(model_type, text_config=text, vision_config=vision)


def load(folder: Path, **settings) -> Target:
    return load_target(TargetConfig(path=str(folder), device="cpu", **settings))


def read(folder: Path, **settings) -> TargetHead:
    return read_target_head(TargetConfig(path=str(folder), device="cpu", **settings))


def assert_same_head(head: TargetHead, target: Target) -> None:
    assert torch.equal(head.embed_tokens, target.model.get_input_embeddings().weight)
    assert torch.equal(head.weight, target.model.get_output_embeddings().weight)
    assert (head.weight is head.embed_tokens) == (target.head.weight is target.head.embed_tokens)
    assert (head.logit_scale, head.soft_cap) == (target.head.logit_scale, target.head.soft_cap)


def test_no_family_is_untested():
    assert FAMILIES.keys() == KNOWN_FAMILIES.keys()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_features_and_head_give_the_own_logits_of_every_family(model_type, tmp_path):
    target = load(save_tiny_target(tmp_path, family_config(model_type)))
    input_ids = torch.randint(0, 259, (3, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = target.model(input_ids=input_ids).logits

    check_output_head(target, input_ids)
    assert_close(target.head.logits(target.features(input_ids)), theirs.float())
    assert_same_head(read(tmp_path), target)
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not list(read(tmp_path).parameters())


@pytest.mark.parametrize("model_type", ["gemma3", "mistral3"])
def test_the_text_part_of_an_image_text_model_is_a_target(model_type, tmp_path):
    target = load(save_tiny_target(tmp_path, wrapped_config(model_type)))
    input_ids = torch.arange(20)[None] + 3
    with torch.no_grad():
        theirs = target.model(input_ids=input_ids).logits

    assert_close(target.head.logits(target.features(input_ids)), theirs.float())
    assert_same_head(read(tmp_path), target)
    assert len(target.fingerprint["weights"]) == 16


def test_the_attention_cap_of_gemma2_is_in_the_features(tmp_path):
    """PyTorch's fused attention, the default, leaves the cap out without a word."""
    folder = save_tiny_target(tmp_path, family_config("gemma2"))
    input_ids = torch.arange(20)[None] + 3
    with torch.no_grad():
        exact = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").model
        expected = exact(input_ids=input_ids).last_hidden_state

    assert_close(load(folder).features(input_ids), expected)


def test_padding_on_the_right_changes_no_feature(target_path):
    target = load(target_path)
    row = torch.arange(3, 20)
    padded = torch.zeros(2, 30, dtype=torch.int64)
    padded[0, :17], padded[1] = row, torch.arange(30)

    assert_close(target.features(padded)[0, :17], target.features(row[None])[0])


def test_an_unknown_family_is_refused_by_name(tmp_path):
    config = AutoConfig.for_model("gpt2", vocab_size=259, n_embd=8, n_layer=1, n_head=2)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is a gpt2 model.*Tested families: apertus, cohere, "):
        load(tmp_path)


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config.json. Expected the folder"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"There is no folder"):
        read(tmp_path / "absent")
    save_tiny_target(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no weights. Looked for model.safetensors"):
        read(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "adapter_config.json")
    with pytest.raises(ValueError, match=r"holds an adapter, not a model. Merge it"):
        read(tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_head_has_the_dtype_of_the_target(dtype, target_path):
    target = load(target_path, dtype=dtype)
    assert target.head.weight.dtype == getattr(torch, dtype)
    assert_same_head(read(target_path, dtype=dtype), target)
    check_output_head(target, torch.arange(40).reshape(2, 20))
    with pytest.raises(ValueError, match=r"target.dtype is int8, expected auto, float32"):
        read(target_path, dtype="int8")


class BeforeTheNorm(Target):
    """A target whose features are taken one step too early."""

    def features(self, input_ids):
        states = []
        hook = self.model.model.norm.register_forward_hook(lambda _, args, __: states.append(args))
        with torch.no_grad():
            self.model.model(input_ids=input_ids)
        hook.remove()
        return states[0][0]


def test_features_before_the_final_norm_are_refused(target_path):
    target = BeforeTheNorm(**vars(load(target_path)))
    with pytest.raises(ValueError, match=r"differs from the target's own logits by up to"):
        check_output_head(target, torch.arange(20)[None])


def test_a_head_without_the_scale_of_its_family_is_refused(tmp_path):
    target = load(save_tiny_target(tmp_path, family_config("granite")))
    target.head.logit_scale = 1.0
    with pytest.raises(ValueError, match=r"differs from the target's own logits by up to"):
        check_output_head(target, torch.arange(20)[None])
