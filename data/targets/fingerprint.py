"""What identifies a target: every artifact carries it, and the next stage compares it."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from transformers import PretrainedConfig

from data.config import TargetConfig
from data.targets.checkpoint_files import Checkpoint, open_checkpoint
from data.targets.families import EMBEDDINGS, NORMS, OUTPUTS, load_config, load_tokenizer

PLACE = ("path", "revision")
WIDTHS = {"fp8": 8, "fbgemm_fp8": 8, "mxfp4": 4}  # methods whose config does not say
QUANTISED = (
    " (none is full precision; quantised weights give other features, and a head fits only the "
    "copy that it was dumped from: dump with the one that is served)"
)


def fingerprint(config: TargetConfig) -> dict[str, str]:
    """What identifies a target, read from its files without loading it."""
    loaded = load_config(config)
    tokenizer = load_tokenizer(config)
    checkpoint = open_checkpoint(config)
    return {
        "path": config.path,
        "revision": config.revision or "",
        "model_type": loaded.model_type,
        "config": _digest([_canonical(loaded)]),
        "weights": _digest(_weight_samples(checkpoint, loaded)),
        "tokenizer": _digest([_tokenizer_text(tokenizer)]),
        "chat_template": _digest([json.dumps(tokenizer.chat_template, sort_keys=True)]),
        "quantization": _quantization(checkpoint, loaded),
    }


def fingerprint_differences(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """One readable line for each field that differs; the place of a target is none of them.

    The quantization comes first: where it differs, the config and the weights do so because of it.
    """
    fields = [key for key in {"quantization": "", **ours, **theirs} if key not in PLACE]
    return [
        f"{key}: {ours.get(key, 'absent')} here, {theirs.get(key, 'absent')} there"
        + (QUANTISED if key == "quantization" else "")
        for key in fields
        if ours.get(key) != theirs.get(key)
    ]


def _quantization(checkpoint: Checkpoint, loaded: PretrainedConfig) -> str:
    """Method and width of the weights, such as `awq 4-bit` or `gguf Q4_K`; none if not quantised.

    A method whose config says no width is named alone.
    """
    if checkpoint.location.gguf_file:
        return f"gguf {checkpoint.gguf_type()}"
    settings = getattr(loaded, "quantization_config", None) or {}
    if not isinstance(settings, dict):
        settings = settings.to_dict()
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    groups = [group.get("weights") or {} for group in settings.get("config_groups", {}).values()]
    widths = {group["num_bits"] for group in groups if "num_bits" in group}  # compressed-tensors
    widths |= {settings[key] for key in ("bits", "w_bit", "nbits") if settings.get(key)}
    widths |= {bits for bits in (4, 8) if settings.get(f"load_in_{bits}bit")}  # bitsandbytes
    widths |= {WIDTHS[method]} if method in WIDTHS else set()
    names = "/".join(f"{bits}-bit" for bits in sorted(widths))
    return f"{method} {names}".strip() if settings else "none"


def _weight_samples(checkpoint: Checkpoint, loaded: PretrainedConfig) -> Iterable[bytes | str]:
    """Names and first rows of both matrices, the final norm and the whole last layer.

    A fine-tuned or merged model differs there, and on the hub they lie in two or three files.
    """
    last = loaded.get_text_config().num_hidden_layers - 1
    wanted = (f"layers.{last}.", f"blk.{last}.")
    for name in sorted(checkpoint.files):
        in_layer = any(part in name for part in wanted) and "vision" not in name
        if in_layer or name in EMBEDDINGS + OUTPUTS + NORMS:
            yield name
            yield checkpoint.sample(name)


def _canonical(loaded: PretrainedConfig) -> str:
    """The config without what may differ between two copies of one model."""
    volatile = {"_name_or_path", "transformers_version", "architectures", "dtype", "use_cache"}
    fields = {k: v for k, v in loaded.to_diff_dict().items() if k not in volatile}
    return json.dumps(fields, sort_keys=True, default=str)


def _tokenizer_text(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return backend.to_str()
    return json.dumps(tokenizer.get_vocab(), sort_keys=True)


def _digest(parts: Iterable[bytes | str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]
