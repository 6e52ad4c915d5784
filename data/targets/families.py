"""The tested families of targets: where their matrices are, and what is done to their logits."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
)

from data.config import TargetConfig
from data.targets.checkpoint_files import explained, locate

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _plain(config: Any) -> tuple[float, float | None]:
    return 1.0, None


def _capped(config: Any) -> tuple[float, float | None]:
    return 1.0, config.final_logit_softcapping


def _scaled(config: Any) -> tuple[float, float | None]:
    return config.logit_scale, None


# model_type of the text model -> (scale, soft cap) that turn `lm_head(f)` into its logits.
# A family belongs here once a test shows that features and head give the model's own logits.
FAMILIES: dict[str, Callable[[Any], tuple[float, float | None]]] = {
    "apertus": _plain,
    "cohere": _scaled,
    "cohere2": _scaled,
    "ernie4_5": _plain,
    "exaone4": _plain,
    "gemma": _plain,
    "gemma2": _capped,
    "gemma3_text": _capped,
    "glm4": _plain,
    "glm4_moe": _plain,
    "gpt_oss": _plain,
    "granite": lambda config: (1.0 / config.logits_scaling, None),
    "llama": _plain,
    "mistral": _plain,
    "mixtral": _plain,
    "olmo2": _plain,
    "olmo3": _plain,
    "phi3": _plain,
    "qwen2": _plain,
    "qwen2_moe": _plain,
    "qwen3": _plain,
    "qwen3_moe": _plain,
    "seed_oss": _plain,
    "smollm3": _plain,
}
# Image-text models whose text part works alone, and the class that Transformers loads them with.
WRAPPERS = {"gemma3": AutoModelForCausalLM, "mistral3": AutoModelForImageTextToText}

EMBEDDINGS = (
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "token_embd.weight",  # GGUF
)
OUTPUTS = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "output.weight",  # GGUF
)
BIASES = ("lm_head.bias", "language_model.lm_head.bias", "output.bias")
NORMS = (
    "model.norm.weight",
    "language_model.model.norm.weight",
    "model.language_model.norm.weight",
    "output_norm.weight",  # GGUF
)


def load_config(config: TargetConfig) -> PretrainedConfig:
    """The target's own config. Raises ValueError if its family is not among FAMILIES."""
    location = locate(config)
    with explained(location, "config"):
        loaded = AutoConfig.from_pretrained(
            location.path, trust_remote_code=config.trust_remote_code, **location.arguments
        )
    text = loaded.get_text_config()
    known = loaded.model_type in FAMILIES or loaded.model_type in WRAPPERS
    if not known or text.model_type not in FAMILIES:
        raise ValueError(
            f"{config.path} is a {loaded.model_type} model, whose output head has not been tested "
            f"here. Tested families: {', '.join(sorted(FAMILIES))}; text part of "
            f"{', '.join(WRAPPERS)}. To add one: a line in FAMILIES "
            "(data/targets/families.py) with the scale and soft cap of its logits, and a line in "
            "tests/test_target.py, whose test holds features and head against the model's own "
            "logits."
        )
    return loaded


def model_class(loaded: PretrainedConfig) -> Any:
    """The Auto class of Transformers that builds the target with its output head."""
    return WRAPPERS.get(loaded.model_type, AutoModelForCausalLM)


def load_tokenizer(config: TargetConfig) -> Any:
    """The target's tokenizer."""
    location = locate(config)
    with explained(location, "tokenizer"):
        return AutoTokenizer.from_pretrained(
            location.path, trust_remote_code=config.trust_remote_code, **location.arguments
        )


def logit_rule(loaded: PretrainedConfig) -> tuple[float, float | None]:
    """Scale and soft cap that the family applies to its output head's product."""
    text = loaded.get_text_config()
    return FAMILIES[text.model_type](text)


def target_dtype(config: TargetConfig, loaded: PretrainedConfig) -> torch.dtype:
    """The dtype that the target runs in. Raises ValueError for one that it cannot run in."""
    name = config.dtype
    if name == "auto":
        own = loaded.dtype or loaded.get_text_config().dtype or torch.float32
        name = str(own).removeprefix("torch.")
    dtype = getattr(torch, name, None)
    if dtype not in DTYPES:
        known = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        own = f" ({config.path} has {name})" if config.dtype == "auto" else ""
        raise ValueError(f"target.dtype is {config.dtype}{own}, expected auto, {known}.")
    return dtype
