"""Names and shapes of a head's tensors, and the sizes that a config.json means by itself."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig

LAYER = "layers.0"
ATTENTION = tuple(f"{LAYER}.self_attn.{name}_proj.weight" for name in "qkvo")
MLP = tuple(f"{LAYER}.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
NORM = f"{LAYER}.post_attention_layernorm.weight"
# A head with one of these is another network than `eagle` engines build.
NORMS_OF_OTHERS = {"norm.weight", f"{LAYER}.input_layernorm.weight"}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int  # of the MLP


def config_sizes(keys: dict[str, Any]) -> Sizes:
    """What a Llama config with these keys means; absent ones are LlamaConfig's defaults."""
    hidden, heads = keys.get("hidden_size") or 4096, keys.get("num_attention_heads") or 32
    return Sizes(
        hidden=hidden,
        heads=heads,
        kv_heads=keys.get("num_key_value_heads") or heads,
        head_dim=keys.get("head_dim") or hidden // heads,
        width=keys.get("intermediate_size") or 11008,
    )


def head_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a head; fc.bias too, for heads that have one."""
    hidden, width = sizes.hidden, sizes.width
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,)}
    shapes |= dict(
        zip(ATTENTION, [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q)], strict=True)
    )
    shapes |= dict(zip(MLP, [(width, hidden), (width, hidden), (hidden, width)], strict=True))
    return shapes | {NORM: (hidden,)}


def normal_name(name: str, names: Collection[str]) -> str:
    """The name that engines expect: no `model.`, and a head's only layer is layers.0."""
    name = name.removeprefix("model.")
    layers = {n for other in names for n in re.findall(r"layers\.(\d+)\.", other)}
    return re.sub(r"layers\.\d+\.", f"{LAYER}.", name) if len(layers) == 1 else name


def rope_config(keys: dict[str, Any], sizes: Sizes) -> LlamaConfig:
    """The RoPE settings of a config.json, in either spelling, for `LlamaRotaryEmbedding`."""
    parameters = dict(keys.get("rope_parameters") or keys.get("rope_scaling") or {})
    parameters.setdefault("rope_theta", keys.get("rope_theta") or 10000.0)
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    return LlamaConfig(
        hidden_size=sizes.heads * sizes.head_dim,  # only head_dim matters here
        num_attention_heads=sizes.heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=keys.get("max_position_embeddings") or 2048,
        rope_parameters=parameters,
    )
