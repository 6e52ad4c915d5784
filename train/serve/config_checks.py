"""What a validator looks for in a head's config.json."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from train.serve.case import Case, Hit
from train.serve.engine_config import dtype_name
from train.serve.families import VERSIONS, unserved
from train.serve.rules import ENGINES
from train.serve.shapes import rope_config
from train.serve.target_facts import sliding_window

ARCHITECTURES = {"vllm": "EagleLlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}
# Head classes of other shapes that vLLM has, and SGLang's of other shapes.
OTHER_CLASSES = {
    "vllm": {"EagleMistralForCausalLM", "EagleLlama4ForCausalLM", "EagleCohereForCausalLM"}
    | {"EagleMiniCPMForCausalLM"},
    "sglang": {"MistralForCausalLMEagle", "MistralLarge3ForCausalLMEagle"},
}


def _network(case: Case) -> Iterator[Hit]:
    """Keys that make another network of the same tensors."""
    keys, sizes, facts = case.folder.keys, case.sizes, case.facts
    if keys.get("num_hidden_layers") != 1:
        yield _key("layer-count", keys, "num_hidden_layers", 1)
    if sizes.hidden != facts.head.hidden_size:
        yield _key("hidden-size", keys, "hidden_size", facts.head.hidden_size)
    if keys.get("vocab_size") != len(facts.embed_tokens):
        yield _key("vocab-size", keys, "vocab_size", len(facts.embed_tokens))
    own_dim = sizes.hidden // sizes.heads
    if "head_dim" not in keys and own_dim != facts.head.head_dim:
        yield _key("head-dim", keys, "head_dim", facts.head.head_dim)
    for key in ("bias", "attention_bias", "mlp_bias"):
        if keys.get(key):
            yield _key("bias-keys", keys, key, False)
    if keys.get("hidden_act", "silu") != "silu":
        yield _key("activation", keys, "hidden_act", "silu")
    cap = getattr(facts.config.get_text_config(), "final_logit_softcapping", None)
    if cap and keys.get("final_logit_softcapping") != cap:
        yield _key("soft-cap", keys, "final_logit_softcapping", cap)
    wanted = facts.head.max_position_embeddings
    if keys.get("max_position_embeddings", 2048) < wanted:
        yield _key("positions", keys, "max_position_embeddings", f"at least {wanted}")


def _angles(case: Case) -> Iterator[Hit]:
    """RoPE and epsilon: nothing in the tensors tells what they were trained with."""
    keys, head = case.folder.keys, case.facts.head
    own = rope_config(keys, case.sizes)
    said = any(keys.get(key) for key in ("rope_theta", "rope_parameters", "rope_scaling"))
    if case.sizes.head_dim == head.head_dim and not _same_rope(own, head):
        found = (
            f"{own.rope_parameters if said else 'absent'}, the target has {head.rope_parameters}"
        )
        yield Hit(rule="rope-other" if said else "rope-missing", subject="rope", found=found)
    epsilon = keys.get("rms_norm_eps")
    if abs((epsilon or 1e-6) / head.rms_norm_eps - 1) > 1e-3:
        rule = "epsilon-missing" if epsilon is None else "epsilon-other"
        yield _key(rule, keys, "rms_norm_eps", head.rms_norm_eps)


def _same_rope(one: Any, other: Any) -> bool:
    a, b = LlamaRotaryEmbedding(one), LlamaRotaryEmbedding(other)
    same_scale = a.attention_scaling == b.attention_scaling
    return same_scale and torch.allclose(a.inv_freq, b.inv_freq, rtol=1e-5, atol=0)


def _classes(case: Case) -> Iterator[Hit]:
    """How the engine recognises the head, and whether it can serve such a target at all."""
    keys = case.folder.keys
    if keys.get("model_type") not in ("llama", "qwen2"):
        yield _key("model-type", keys, "model_type", "llama")
    window = sliding_window(case.facts.config)
    if window and window < case.facts.head.max_position_embeddings:
        found = f"all its layers attend to the last {window} tokens only"
        yield Hit(rule="target-window", subject="target", found=found)
    names = keys.get("architectures") or [""]
    biased = any(re.search(r"[qkv]_proj\.bias$", name) for name in case.tensors)
    for engine in ENGINES:
        rule = _architecture(names[0], engine, biased=biased)
        if rule is not None:
            found = f"{keys.get('architectures', 'absent')}"
            yield Hit(rule=rule, subject="architectures", found=found, engines=(engine,))
        if (why := unserved(engine, case.facts.model_type)) is not None:
            found = f"{case.facts.model_type}, seen with {VERSIONS[engine]}: {why}"
            yield Hit(rule="target-family", subject="target", found=found, engines=(engine,))


def _architecture(name: str, engine: str, *, biased: bool) -> str | None:
    if not name:
        return "architecture-absent"
    if engine == "vllm" and not name.startswith("Eagle"):
        name = f"Eagle{name}"
    if name == ARCHITECTURES[engine] or (name == "Qwen2ForCausalLMEagle" and biased):
        return None
    if name in OTHER_CLASSES[engine] or name == "Qwen2ForCausalLMEagle":
        return "architecture-class"
    plain = engine == "sglang" and name.endswith("ForCausalLM")
    return "architecture-plain" if plain else "architecture-unknown"


def _start(case: Case) -> Iterator[Hit]:
    """Keys at which only SGLang stumbles."""
    keys, wanted = case.folder.keys, dtype_name(case.facts.dtype)
    if keys.get("tie_word_embeddings"):
        yield _key("tied-flag", keys, "tie_word_embeddings", False)
    said = keys.get("torch_dtype") or keys.get("dtype")
    if said != wanted:
        found = f"{said or 'absent'}, the target has {wanted}"
        yield Hit(rule="dtype", subject="torch_dtype", found=found)
    elif wanted == "float32":
        yield Hit(rule="dtype-float32", subject="torch_dtype", found="float32, as the target")


def _key(rule: str, keys: dict[str, Any], key: str, wanted: object) -> Hit:
    found = f"{keys[key]!r}" if key in keys else "absent"
    return Hit(rule=rule, subject=key, found=f"{found}, expected {wanted}")


CONFIG_CHECKS: tuple[Callable[[Case], Iterator[Hit]], ...] = (_network, _angles, _classes, _start)
