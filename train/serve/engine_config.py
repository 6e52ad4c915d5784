"""What serving engines read from a head's folder: the keys of config.json, the names of tensors.

Both engines fill what is missing with defaults and drop what they do not know, mostly without a
word, and verification hides the damage: only fewer draft tokens are accepted. So every key that
matters is written, and the set of tensors is exact.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from train.head import DraftHead

ENGINE_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "eagle": "the EAGLE repository"}
# vLLM puts "Eagle" in front of the name itself; SGLang wants it at the end.
ARCHITECTURES = {
    "vllm": "LlamaForCausalLM",
    "sglang": "LlamaForCausalLMEagle",
    "eagle": "LlamaForCausalLM",
}
# The EAGLE repository's loader opens this name and no other.
WEIGHTS = {
    "vllm": "model.safetensors",
    "sglang": "model.safetensors",
    "eagle": "pytorch_model.bin",
}


def engine_config(
    head: LlamaConfig, target: PretrainedConfig, *, engine: str, vocab_size: int, dtype: torch.dtype
) -> dict[str, Any]:
    """The config.json of a head for `engine`.

    head:        the head's own config: widths, RoPE and epsilon as trained
    target:      the config of its target
    vocab_size:  rows of the target's output matrix; above a smaller number nothing is ever drafted
    dtype:       of the target; SGLang runs a head without one in float16 and stops
    """
    config = {
        "architectures": [ARCHITECTURES[engine]],
        "model_type": "llama",
        "hidden_size": head.hidden_size,
        "intermediate_size": head.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": head.num_attention_heads,
        "num_key_value_heads": head.num_key_value_heads,
        "head_dim": head.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": head.rms_norm_eps,
        "vocab_size": vocab_size,
        "max_position_embeddings": head.max_position_embeddings,
        **rope_keys(dict(head.rope_parameters or {})),
        "tie_word_embeddings": False,  # with true SGLang stops at start; vLLM does not look
        "torch_dtype": dtype_name(dtype),
        "bos_token_id": head.bos_token_id,
        "eos_token_id": head.eos_token_id,
    }
    if engine == "vllm":
        # Said, not left out: a true here would give the layers biases that no tensor fills.
        config |= {"attention_bias": False, "mlp_bias": False, "bias": False}
    if engine == "eagle":
        # Means fc's bias here, and an absent key means that there is one.
        config["bias"] = bool(getattr(head, "fc_bias", False))
    soft_cap = getattr(target.get_text_config(), "final_logit_softcapping", None)
    if engine == "sglang" and soft_cap:
        config["final_logit_softcapping"] = soft_cap  # SGLang's head caps its logits by itself
    return config


def rope_keys(parameters: dict[str, Any]) -> dict[str, Any]:
    """RoPE settings as Transformers 5 spells them and as 4 did: engines read one or the other."""
    theta = parameters["rope_theta"]
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    keys = {"rope_theta": theta, "rope_parameters": {"rope_theta": theta, **scaling}}
    if scaling.get("rope_type", "default") != "default":
        keys["rope_scaling"] = scaling
    return keys


def engine_tensors(
    head: DraftHead, *, engine: str, dtype: torch.dtype, embed_tokens: Tensor
) -> dict[str, Tensor]:
    """The tensors of the weights file, converted once to `dtype`.

    embed_tokens: [V, H]  of the target; only the EAGLE repository's loader asks for a copy

    SGLang's fc always has a bias, random if the file has none; vLLM's never has one. Raises
    ValueError for a head with a bias that vLLM would drop.
    """
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in head.state_dict().items()
    }
    if engine == "vllm" and "fc.bias" in tensors:
        norm = float(tensors["fc.bias"].float().norm())
        raise ValueError(
            f"This head has an fc.bias that is not zero (its norm is {norm:.3g}), and vLLM drops "
            "it silently: it would serve another network. Export it with engine=sglang or "
            "engine=eagle, which have one; or train on without it (train_head init_from=... "
            "init_drop_bias=true) and export that."
        )
    if engine == "sglang":
        tensors.setdefault("fc.bias", torch.zeros(head.config.hidden_size, dtype=dtype))
    if engine == "eagle":
        tensors["embed_tokens.weight"] = embed_tokens.detach().to("cpu", dtype).contiguous()
    return tensors


def tensor_problems(
    tensors: dict[str, Tensor], expected: dict[str, torch.Size], *, dtype: torch.dtype
) -> list[str]:
    """What an engine would not notice: names, shapes, dtype, non-finite values, a bias in use."""
    problems = [f"{name} is missing" for name in sorted(expected.keys() - tensors.keys())]
    problems += [f"{name} does not belong" for name in sorted(tensors.keys() - expected.keys())]
    for name in sorted(tensors.keys() & expected.keys()):
        tensor = tensors[name]
        if tensor.shape != expected[name]:
            problems.append(f"{name} is {list(tensor.shape)}, expected {list(expected[name])}")
        if tensor.dtype != dtype:
            problems.append(f"{name} is {dtype_name(tensor.dtype)}, expected {dtype_name(dtype)}")
        if not tensor.isfinite().all():
            problems.append(f"{name} holds values that are not finite")
    return problems


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
