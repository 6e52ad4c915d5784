"""A folder that an engine serves as it was meant, from one that it does not: what can be repaired.

Only what has one right answer is changed: names, keys that the tensors or the target determine,
biases of zeros, copies of the target's own matrices. A missing or foreign tensor is not made up.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from train.serve.engine_config import dtype_name, engine_config
from train.serve.folder import HeadFolder
from train.serve.import_head import config_of, stored_in
from train.serve.rules import NOTE
from train.serve.shapes import ATTENTION, MLP, Sizes, config_sizes, head_shapes
from train.serve.target_facts import TargetFacts
from train.serve.trial import Reading, swap_halves
from train.serve.validate import Finding, findings


@dataclass(frozen=True, kw_only=True)
class Repaired:
    """A folder as it should be, what was done to it, and what stays wrong."""

    folder: HeadFolder
    done: list[str]
    left: list[Finding]


def repair(
    folder: HeadFolder, facts: TargetFacts, *, engine: str, best: Reading | None = None
) -> Repaired:
    """Repair a folder for one engine. Pure: nothing is written.

    best: the reading of the head that predicts the target best, if it has been tried
    """
    done: list[str] = []
    tensors = _tensors(folder, facts, engine, done)
    if best is not None and best.swapped and "fc.weight" in tensors:
        tensors["fc.weight"] = swap_halves(tensors["fc.weight"])
        done.append("fc.weight: the halves for embedding and feature have changed places")
    config = _config(folder, facts, tensors, target_rope=best is not None and best.target_rope)
    dtype = facts.dtype
    if any(t.is_floating_point() and t.dtype != dtype for t in tensors.values()):
        names = {dtype_name(t.dtype) for t in tensors.values()}
        done.append(f"weights: converted from {', '.join(sorted(names))} to {dtype_name(dtype)}")
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    keys = engine_config(
        config, facts.config, engine=engine, vocab_size=len(facts.embed_tokens), dtype=dtype
    )
    done += _changes(folder.keys, keys)
    repaired = replace(
        folder, keys=keys, tensors=tensors, files=["model.safetensors"], twice=[], altered=False
    )
    after = [one for one in findings(repaired, facts) if one.engine == engine]
    return Repaired(folder=repaired, done=done, left=[f for f in after if f.verdict != NOTE])


def _tensors(
    folder: HeadFolder, facts: TargetFacts, engine: str, done: list[str]
) -> dict[str, Tensor]:
    """The tensors under the right names, less those that mean nothing; says so in `done`."""
    stored = stored_in(folder)
    renamed = sum(name not in stored.tensors for name in folder.tensors)
    buffers = sum(name.endswith("rotary_emb.inv_freq") for name in folder.tensors)
    if renamed - buffers > 0:
        done.append(f"{renamed - buffers} tensors renamed, such as {next(iter(stored.tensors))}")
    if buffers:
        done.append("rotary_emb.inv_freq left out: the angles follow from config.json")
    if len(folder.files) > 1 or folder.files != ["model.safetensors"]:
        done.append(f"{', '.join(folder.files)} written as one model.safetensors")
    rules = {one.subject: one.rule for one in findings(folder, facts)}
    tensors = {}
    for name, tensor in stored.tensors.items():
        why = _surplus(name, tensor, rules.get(name), facts, engine)
        if why is None:
            tensors[name] = tensor
        else:
            done.append(f"{name} left out: {why}")
    if engine == "sglang" and "fc.bias" not in tensors and "fc.weight" in tensors:
        tensors["fc.bias"] = torch.zeros(len(tensors["fc.weight"]), dtype=facts.dtype)
        done.append("fc.bias of zeros written")
    return tensors


def _surplus(
    name: str, tensor: Tensor, rule: str | None, facts: TargetFacts, engine: str
) -> str | None:
    """Why a tensor can be left out without changing the network; None if it cannot."""
    if name == "fc.bias":
        return "all zeros" if engine == "vllm" and not tensor.any() else None
    if name.endswith(".bias"):
        return "all zeros" if not tensor.any() else None
    if rule == "embedding-copy":
        return "equal to the target's"
    if name == "lm_head.weight" and rule == "output-head":
        return "equal to the target's" if _equals(tensor, facts.output) else None
    return None


def _equals(tensor: Tensor, wanted: Tensor) -> bool:
    return tensor.shape == wanted.shape and torch.allclose(
        tensor.float(), wanted.float(), rtol=0.01, atol=1e-3
    )


def _config(
    folder: HeadFolder, facts: TargetFacts, tensors: dict[str, Tensor], *, target_rope: bool
) -> LlamaConfig:
    """The head's config: what the folder says where that is said and fits, else the target's."""
    keys, own, head = folder.keys, config_of(folder.keys), facts.head
    config = LlamaConfig.from_dict(head.to_dict())
    sizes = _sizes(config_sizes(keys), head, tensors)
    config.hidden_size, config.intermediate_size = sizes.hidden, sizes.width
    config.num_attention_heads, config.num_key_value_heads = sizes.heads, sizes.kv_heads
    config.head_dim = sizes.head_dim
    said = any(keys.get(key) for key in ("rope_theta", "rope_parameters", "rope_scaling"))
    if said and not target_rope:
        config.rope_parameters = own.rope_parameters
    if keys.get("rms_norm_eps"):
        config.rms_norm_eps = own.rms_norm_eps
    return config


def _sizes(said: Sizes, head: LlamaConfig, tensors: dict[str, Tensor]) -> Sizes:
    """Sizes that fit the tensors: those of config.json, else the target's; the widths are the
    tensors' own."""
    dim = head.head_dim or head.hidden_size // head.num_attention_heads
    fc, gate = tensors.get("fc.weight"), tensors.get(MLP[0])
    hidden = len(fc) if fc is not None else head.hidden_size
    width = len(gate) if gate is not None else head.intermediate_size
    kv_heads = head.num_key_value_heads or head.num_attention_heads
    theirs = Sizes(
        hidden=hidden, heads=head.num_attention_heads, kv_heads=kv_heads, head_dim=dim, width=width
    )
    candidates = [replace(said, hidden=hidden, width=width), theirs]
    for name, count in (("q", "heads"), ("k", "kv_heads")):
        tensor = tensors.get(f"layers.0.self_attn.{name}_proj.weight")
        if tensor is not None:
            theirs = replace(theirs, **{count: len(tensor) // dim})
    candidates.append(theirs)
    return next((sizes for sizes in candidates if _fit(sizes, tensors)), candidates[0])


def _fit(sizes: Sizes, tensors: dict[str, Tensor]) -> bool:
    shapes = head_shapes(sizes)
    return all(
        tuple(tensors[name].shape) == shapes[name] for name in (*ATTENTION, *MLP) if name in tensors
    )


def _changes(before: dict[str, Any], after: dict[str, Any]) -> Iterable[str]:
    """One line for each key of config.json that an engine reads and that is now another."""
    for key, value in after.items():
        old = before.get(key, before.get("dtype") if key == "torch_dtype" else None)
        same = old == value or (
            isinstance(old, float) and isinstance(value, float) and math.isclose(old, value)
        )
        if not same:
            yield f"config.json: {key} {'absent' if old is None else repr(old)} -> {value!r}"
    dropped = sorted(before.keys() - after.keys())
    if dropped:
        yield f"config.json: left out {', '.join(dropped)}"
