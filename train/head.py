"""The draft head: one projection and one Llama layer that guess the target's next feature.

EAGLE (arXiv 2401.15077, section 4.1). Parameter names are the names that serving engines load, so
a checkpoint's tensors are the export's tensors.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from train.fit.unroll import chain_attention

SERVED_INPUTS = "feature_token"  # the one kind of fc that engines build


def draft_config(
    target: PretrainedConfig, *, intermediate_size: int | None = None, inputs: str = SERVED_INPUTS
) -> LlamaConfig:
    """The Llama-shaped config of a head for `target`, whatever family the target is.

    Heads, widths, RoPE and epsilon are the target's own; a mixture of experts gives its dense
    equivalent width (experts per token x expert width). Raises ValueError if a size is missing.

    inputs: what fc reads (`head.inputs`); kept in the config only where it is not the usual one
    """
    text: Any = target.get_text_config()
    extra: dict[str, Any] = {} if inputs == SERVED_INPUTS else {"head_inputs": inputs}
    hidden = text.hidden_size
    num_heads = text.num_attention_heads
    width = intermediate_size or _dense_width(text)
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=text.vocab_size,
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=num_heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(text, "head_dim", None) or hidden // num_heads,
        hidden_act="silu",
        rms_norm_eps=float(getattr(text, "rms_norm_eps", None) or text.layer_norm_eps),
        max_position_embeddings=text.max_position_embeddings,
        rope_parameters=_rope_parameters(text),
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        **extra,
    )


def _dense_width(text: PretrainedConfig) -> int:
    experts = getattr(text, "num_experts_per_tok", None)
    per_expert = getattr(text, "moe_intermediate_size", None)
    if experts and per_expert:
        return max(experts * per_expert, text.hidden_size)
    return text.intermediate_size


def _rope_parameters(text: PretrainedConfig) -> dict:
    """RoPE settings from the nested field of Transformers 5 or the flat ones of 4."""
    parameters = dict(getattr(text, "rope_parameters", None) or {})
    if "full_attention" in parameters:  # one entry per layer type (Gemma 3): the global layers'
        parameters = dict(parameters["full_attention"])
    if not parameters:
        parameters = dict(getattr(text, "rope_scaling", None) or {})
        parameters["rope_theta"] = getattr(text, "rope_theta", 10000.0)
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    # The head's heads rotate in full, as both engines build it (Phi's rotate in part).
    parameters.pop("partial_rotary_factor", None)
    return parameters


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        assert dim and config.num_key_value_heads  # draft_config gives both
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, hidden, bias=False)


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A Llama layer without `input_layernorm`: both engines leave it out of an EAGLE head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class DraftHead(nn.Module):
    """Maps pair j, `(f_j, t_{j+1})`, to the predicted feature `f̂_{j+1}`.

    `forward` runs packed documents; decoding calls its three parts (`fuse`, `query_key_value`,
    `finish`) around an attention of its own.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.inputs: str = getattr(config, "head_inputs", SERVED_INPUTS)
        width = config.hidden_size * (2 if self.inputs == "feature_token" else 1)
        # Trained here without a bias; some published heads have one.
        bias = getattr(config, "fc_bias", False)
        self.fc = nn.Linear(width, config.hidden_size, bias=bias)
        self.layers = nn.ModuleList([DecoderLayer(config)])
        self.rotary = LlamaRotaryEmbedding(config)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)

    def forward(
        self,
        embeddings: Tensor,
        features: Tensor,
        lengths: Sequence[int],
        starts: Tensor | None = None,
        num_steps: int = 1,
    ) -> Tensor:
        """Predict the next feature of every pair of a few packed documents, or draft on from some.

        embeddings: [T, H]  raw embedding rows of t_{j+1}
        features:   [T, H]  f_j
        lengths:    pairs of each document, summing to T; none attends to another. An empty batch
                    is one document of no pairs: a process without data still takes part
        starts:     [M]     ascending pairs that chains of `num_steps` start from (see unroll.py)
        returns     [T, H]  f̂_{j+1}; with starts [num_steps, M, H], f̂_{s+1} ... f̂_{s+num_steps}
        """
        positions = torch.cat([torch.arange(n, device=features.device) for n in lengths])
        x = self.fuse(embeddings, features)
        query, key, value = self.query_key_value(x, positions)
        attended = packed_attention(query, key, value, lengths)
        if starts is None:
            return self.finish(x, attended)

        predicted = [self.finish(x[starts], attended[:, starts])]  # [M, H]
        own: list[tuple[Tensor, Tensor]] = []
        for step in range(1, num_steps):
            # The text's own token, the head's own feature. HASS trains each step on the features
            # that the step before happens to give; no gradient goes back through them.
            tokens = embeddings[(starts + step).clamp(max=len(embeddings) - 1)]
            x = self.fuse(tokens, predicted[-1].detach())
            query, own_key, own_value = self.query_key_value(x, positions[starts] + step)
            own.append((own_key, own_value))
            attended = chain_attention(query, key, value, starts, own, lengths)
            predicted.append(self.finish(x, attended))
        return torch.stack(predicted)

    @property
    def layer(self) -> DecoderLayer:
        return cast(DecoderLayer, self.layers[0])

    def fuse(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """`fc([e; f])`, embedding first: [..., H] and [..., H] -> [..., H]."""
        return self.fc(self.fc_inputs(embeddings, features))

    def fc_inputs(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """What fc reads: [..., 2H], or [..., H] for a head of an ablation (`head.inputs`)."""
        if self.inputs == "token":
            return embeddings
        if self.inputs == "feature":
            return features
        return torch.cat([embeddings, features], dim=-1)

    def query_key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values.

        x:         [..., T, H]
        positions: [..., T]  the RoPE position of pair j is j
        returns    query [..., heads, T, d], key and value [..., kv_heads, T, d]
        """
        attention = self.layer.self_attn
        dim = self.config.head_dim
        query, key, value = (
            projection(x).unflatten(-1, (-1, dim)).transpose(-3, -2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        batched = positions if positions.dim() > 1 else positions[None]
        cos, sin = self.rotary(x, batched)  # [B, T, d]
        if positions.dim() == 1:
            cos, sin = cos[0], sin[0]
        # apply_rotary_pos_emb broadcasts cos and sin over the heads at this dimension
        query, key = apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=-3)
        return query, key, value

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer. x: [..., T, H], attended: [..., heads, T, d] -> [..., T, H]."""
        layer = self.layer
        hidden = x + layer.self_attn.o_proj(attended.transpose(-3, -2).flatten(-2))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def packed_attention(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    """Causal attention inside each document.

    query:      [heads, T, d]
    key, value: [kv_heads, T, d]
    returns     [heads, T, d]
    """
    groups = query.shape[0] // key.shape[0]
    key = key.repeat_interleave(groups, dim=0)
    value = value.repeat_interleave(groups, dim=0)
    parts = [
        F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        for q, k, v in zip(
            query.split(list(lengths), dim=1),
            key.split(list(lengths), dim=1),
            value.split(list(lengths), dim=1),
            strict=True,
        )
    ]
    return torch.cat(parts, dim=1)
