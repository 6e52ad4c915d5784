"""Small real targets of every family, and what is read of them."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PretrainedConfig

from data.config import TargetConfig
from data.targets.model import Target, TargetHead, load_target, read_target_head

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


def family_config(model_type: str, **changes) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, **{**SIZES, **FAMILIES[model_type], **changes})


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


def randomise_norms(folder: Path) -> Path:
    """A new model's norms all have the same weights, and would hide a wrong one."""
    state = load_file(folder / "model.safetensors")
    for name in state:
        if name.endswith("norm.weight"):
            state[name] = torch.rand_like(state[name]) + 0.5
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
