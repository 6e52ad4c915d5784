"""What an engine would make of a head's folder: pure functions over its files, no engine needed."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from train.serve.engine_config import UNSERVED, dtype_name
from train.serve.folder import HeadFolder
from train.serve.rules import ENGINES, NOTE, OTHER, REFUSED, RULES
from train.serve.shapes import (
    ATTENTION,
    MLP,
    NORM,
    NORMS_OF_OTHERS,
    Sizes,
    config_sizes,
    head_shapes,
    normal_name,
    rope_config,
)
from train.serve.target_facts import TargetFacts

ARCHITECTURES = {"vllm": "EagleLlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}
# Head classes of other shapes that vLLM has, and SGLang's of other shapes.
OTHER_CLASSES = {
    "vllm": {"EagleMistralForCausalLM", "EagleLlama4ForCausalLM", "EagleCohereForCausalLM"}
    | {"EagleMiniCPMForCausalLM"},
    "sglang": {"MistralForCausalLMEagle", "MistralLarge3ForCausalLMEagle"},
}


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A rule of RULES that a folder breaks."""

    rule: str
    subject: str  # tensor, key or file
    found: str
    engines: tuple[str, ...] = ENGINES


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one engine makes of a hit."""

    rule: str
    engine: str
    verdict: str  # one of rules.VERDICTS
    subject: str
    found: str
    why: str
    repair: str | None


@dataclass(frozen=True, kw_only=True)
class Case:
    """A folder against a target. `tensors` have the names that engines expect, where possible."""

    folder: HeadFolder
    facts: TargetFacts
    tensors: dict[str, Tensor] = field(init=False)
    sizes: Sizes = field(init=False)

    def __post_init__(self) -> None:
        names = {name: normal_name(name, self.folder.tensors) for name in self.folder.tensors}
        tensors = {names[name]: tensor for name, tensor in self.folder.tensors.items()}
        object.__setattr__(self, "tensors", tensors)
        object.__setattr__(self, "sizes", config_sizes(self.folder.keys))


def findings(folder: HeadFolder, facts: TargetFacts) -> list[Finding]:
    """All that is known to matter about a folder, for both engines. Pure: reads no file."""
    case = Case(folder=folder, facts=facts)
    return effects([hit for check in CHECKS for hit in check(case)])


def effects(hits: list[Hit]) -> list[Finding]:
    """What each engine does about hits; nothing where a hit does not matter to it."""
    found = []
    for engine in ENGINES:
        for hit in hits:
            rule = RULES[hit.rule]
            effect = rule.effect(engine) if engine in hit.engines else None
            if effect is not None:
                verdict, why = effect
                found.append(
                    Finding(
                        rule=hit.rule,
                        engine=engine,
                        verdict=verdict,
                        subject=hit.subject,
                        found=hit.found,
                        why=why,
                        repair=rule.repair,
                    )
                )
    return found


def verdict(found: list[Finding], engine: str) -> str:
    """The worst of an engine's findings: REFUSED, OTHER or NOTE."""
    verdicts = {finding.verdict for finding in found if finding.engine == engine}
    return next((v for v in (REFUSED, OTHER) if v in verdicts), NOTE)


def _files(case: Case) -> Iterator[Hit]:
    folder = case.folder
    if not folder.files:
        yield Hit(rule="no-weights", subject=str(folder.path), found="no .safetensors, .bin or .pt")
    for name in folder.missing_files:
        yield Hit(rule="missing-shard", subject=name, found="absent")
    if folder.twice:
        subject = ", ".join(folder.files)
        yield Hit(rule="second-file", subject=subject, found=f"both hold {_some(folder.twice)}")

    if folder.altered:
        subject = ", ".join(folder.files)
        yield Hit(rule="altered-weights", subject=subject, found="another checksum than recorded")


def _names(case: Case) -> Iterator[Hit]:
    names = list(case.folder.tensors)
    if prefixed := [name for name in names if name.startswith("model.")]:
        yield Hit(rule="prefix", subject=_some(prefixed), found="begins with model.")
    layers = {int(n) for name in names for n in re.findall(r"layers\.(\d+)\.", name)}
    if len(layers) > 1:
        found = f"{len(layers)} layers, one is expected"
        yield Hit(rule="extra-layer", subject=f"layers.{max(layers)}", found=found)
    elif layers and layers != {0}:
        name = next(name for name in names if "layers." in name)
        yield Hit(rule="layer-name", subject=name, found="expected layers.0.")


def _missing(case: Case) -> Iterator[Hit]:
    if not case.folder.files:
        return
    groups = {"missing-fc": ("fc.weight",), "missing-attention": ATTENTION, "missing-mlp": MLP}
    for rule, expected in {**groups, "missing-norm": (NORM,)}.items():
        if absent := [name for name in expected if name not in case.tensors]:
            yield Hit(rule=rule, subject=_some(absent), found="absent")


def _biases(case: Case) -> Iterator[Hit]:
    bias = case.tensors.get("fc.bias")
    if bias is None:
        yield Hit(rule="fc-bias-missing", subject="fc.bias", found="absent")
    elif bias.any():
        norm = float(bias.float().norm())
        yield Hit(rule="fc-bias-used", subject="fc.bias", found=f"not zero, norm {norm:.3g}")
    else:
        yield Hit(rule="fc-bias-zero", subject="fc.bias", found="all zeros")
    keys = case.folder.keys
    qwen = keys.get("architectures") == ["Qwen2ForCausalLMEagle"] or keys.get("attention_bias")
    for name, tensor in case.tensors.items():
        if not name.endswith(".bias") or name == "fc.bias":
            continue
        found = "all zeros" if not tensor.any() else "not zero"
        if re.search(r"layers\.0\.self_attn\.[qkv]_proj\.bias$", name):
            engines = (*(() if keys.get("qkv_bias") else ("vllm",)), *(() if qwen else ("sglang",)))
            yield Hit(rule="qkv-bias", subject=name, found=found, engines=engines)
        else:
            yield Hit(rule="unknown-bias", subject=name, found=found)


def _strangers(case: Case) -> Iterator[Hit]:
    """Tensors that belong to the target, to another kind of head, or to nothing that is known."""
    known = {"fc.weight", *ATTENTION, *MLP, NORM}
    for name, tensor in case.tensors.items():
        if name in known or name.endswith(".bias") or re.search(r"layers\.[1-9]", name):
            continue
        size = f"{list(tensor.shape)}"
        if name == "embed_tokens.weight":
            yield _embedding(tensor, case.facts)
        elif "lm_head" in name:
            equal = _same(tensor, case.facts.output)
            found = "equal to the target's" if equal else f"{size}, not the target's"
            yield Hit(rule="output-head", subject=name, found=found)
        elif name in NORMS_OF_OTHERS:
            yield Hit(rule="extra-norm", subject=name, found=size)
        elif name in ("d2t", "t2d") or name.startswith("midlayer.") or "hidden_norm" in name:
            yield Hit(rule="eagle3", subject=name, found=size)
        elif name.endswith("rotary_emb.inv_freq"):
            yield Hit(rule="rope-buffer", subject=name, found=size)
        else:
            yield Hit(rule="unknown-tensor", subject=name, found=size)


def _embedding(tensor: Tensor, facts: TargetFacts) -> Hit:
    name, wanted = "embed_tokens.weight", facts.embed_tokens
    if tensor.shape != wanted.shape:
        found = f"{list(tensor.shape)}, the target's is {list(wanted.shape)}"
        return Hit(rule="embedding-shape", subject=name, found=found)
    if _same(tensor, wanted):
        return Hit(rule="embedding-copy", subject=name, found=f"{tensor.nbytes / 1e6:,.1f} MB")
    rows = int((~torch.isclose(tensor.float(), wanted.float(), rtol=0.01, atol=1e-3)).any(-1).sum())
    return Hit(rule="own-embedding", subject=name, found=f"{rows} of {len(wanted)} rows differ")


def _same(tensor: Tensor, wanted: Tensor) -> bool:
    """Equal, or equal in half precision: published copies are often converted."""
    if tensor.shape != wanted.shape:
        return False
    return torch.isclose(tensor.float(), wanted.float(), rtol=0.01, atol=1e-3).all().item() is True


def _shapes(case: Case) -> Iterator[Hit]:
    for name, wanted in head_shapes(case.sizes).items():
        tensor = case.tensors.get(name)
        if tensor is None or tuple(tensor.shape) == wanted:
            continue
        found = f"{list(tensor.shape)}, config.json says {list(wanted)}"
        rule = _misfit(name, tuple(tensor.shape), wanted)
        yield Hit(rule=rule, subject=name, found=found)


def _misfit(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """Engines cut or fill the dimension that they would split over GPUs, and no other."""
    if name in ("fc.weight", NORM) or len(found) != len(wanted):
        return "wrong-shape"
    split = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
    if found[1 - split] != wanted[1 - split]:
        return "wrong-shape"
    return "truncated" if found[split] > wanted[split] else "padded"


def _values(case: Case) -> Iterator[Hit]:
    for name, tensor in case.tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            yield Hit(rule="not-finite", subject=name, found="nan or infinite values")
    said = case.folder.keys.get("torch_dtype") or case.folder.keys.get("dtype")
    dtypes = {dtype_name(t.dtype) for t in case.tensors.values() if t.is_floating_point()}
    if said and dtypes - {said}:
        found = f"{_some(sorted(dtypes))}, config.json says {said}"
        yield Hit(rule="weights-dtype", subject="weights", found=found)


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
    names = keys.get("architectures") or [""]
    biased = any(re.search(r"[qkv]_proj\.bias$", name) for name in case.tensors)
    for engine in ENGINES:
        rule = _architecture(names[0], engine, biased=biased)
        if rule is not None:
            found = f"{keys.get('architectures', 'absent')}"
            yield Hit(rule=rule, subject="architectures", found=found, engines=(engine,))
        tried, unserved = UNSERVED[engine]
        if case.facts.model_type in unserved:
            found = f"{case.facts.model_type}, tried with {tried}"
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


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


CHECKS: tuple[Callable[[Case], Iterator[Hit]], ...] = (
    _files,
    _names,
    _missing,
    _biases,
    _strangers,
    _shapes,
    _values,
    _network,
    _angles,
    _classes,
    _start,
)
