"""What a validator looks for in the weights of a head: files, names, shapes, values."""

import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from train.serve.case import Case, Hit, some
from train.serve.engine_config import dtype_name
from train.serve.shapes import ATTENTION, MLP, NORM, NORMS_OF_OTHERS, head_shapes
from train.serve.target_facts import TargetFacts


def _files(case: Case) -> Iterator[Hit]:
    folder = case.folder
    if not folder.files:
        yield Hit(rule="no-weights", subject=str(folder.path), found="no .safetensors, .bin or .pt")
    for name in folder.missing_files:
        yield Hit(rule="missing-shard", subject=name, found="absent")
    if folder.twice:
        subject = ", ".join(folder.files)
        yield Hit(rule="second-file", subject=subject, found=f"both hold {some(folder.twice)}")

    if folder.altered:
        subject = ", ".join(folder.files)
        yield Hit(rule="altered-weights", subject=subject, found="another checksum than recorded")


def _names(case: Case) -> Iterator[Hit]:
    names = list(case.folder.tensors)
    if prefixed := [name for name in names if name.startswith("model.")]:
        yield Hit(rule="prefix", subject=some(prefixed), found="begins with model.")
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
            yield Hit(rule=rule, subject=some(absent), found="absent")


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
    if name in ("fc.weight", "fc.bias", NORM) or len(found) != 2:
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
        found = f"{some(sorted(dtypes))}, config.json says {said}"
        yield Hit(rule="weights-dtype", subject="weights", found=found)


TENSOR_CHECKS: tuple[Callable[[Case], Iterator[Hit]], ...] = (
    _files,
    _names,
    _missing,
    _biases,
    _strangers,
    _shapes,
    _values,
)
