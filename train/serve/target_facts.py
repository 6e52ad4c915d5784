"""What a folder is held against: the target's sizes and embeddings, and the head that fits it."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from data.config import TargetConfig
from data.targets.model import fingerprint, load_config, read_target_head
from train.head import draft_config


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """Read from the target's files; the target itself is not run."""

    path: str
    config: PretrainedConfig
    head: LlamaConfig  # of a head that is trained here for this target
    embed_tokens: Tensor  # [V, H]
    output: Tensor  # [V, H]
    dtype: torch.dtype
    fingerprint: dict[str, str]

    @property
    def model_type(self) -> str:
        return self.config.get_text_config().model_type


def sliding_window(config: PretrainedConfig) -> int | None:
    """The window of a target all of whose layers attend within one; None for any other.

    vLLM then makes the head's attention slide too, whatever the head's config says.
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or ["sliding_attention"])
    return window if window and kinds == {"sliding_attention"} else None


def target_facts(target: TargetConfig) -> TargetFacts:
    config = load_config(target)
    matrices = read_target_head(target)
    return TargetFacts(
        path=target.path,
        config=config,
        head=draft_config(config),
        embed_tokens=matrices.embed_tokens,
        output=matrices.weight,
        dtype=matrices.weight.dtype,
        fingerprint=fingerprint(target),
    )
