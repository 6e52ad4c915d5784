"""Run folders of tiny targets with one checkpoint, and what export makes of them."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from data.config import TargetConfig
from data.files import write_json
from data.targets.model import fingerprint
from tests.tiny import save_tiny_target, tiny_llama_config
from train.config import ExportConfig
from train.head import DraftHead, draft_config
from train.serve.export import export


def save_tiny_run(run: Path, target: Path, *, step: int = 20) -> Path:
    """A run folder with one checkpoint of an untrained head for `target`."""
    torch.manual_seed(1)
    head = DraftHead(draft_config(AutoConfig.from_pretrained(target)))
    torch.nn.init.normal_(head.layers[0].post_attention_layernorm.weight, mean=1.0, std=0.1)
    checkpoint = run / "steps" / f"{step:06d}"
    checkpoint.mkdir(parents=True)
    save_file(head.state_dict(), checkpoint / "head.safetensors")
    head.config.save_pretrained(checkpoint)
    write_json(
        checkpoint / "checkpoint.json",
        {
            "format_version": 1,
            "step": step,
            "acceptance": {"acceptance_length": 1.5, "alpha": [0.4, 0.25], "tried": [10, 4]},
            "fingerprint": fingerprint(TargetConfig(path=str(target))),
            "cache": {"num_tokens": 1000},
            "settings": {"lr": 1e-3, "loss": {"ce_weight": 0.1}},
        },
    )
    return run


def export_tiny(folder: Path, *, engine: str = "vllm", **changes) -> tuple[Path, Path, dict]:
    """Export a head for a tiny target with `changes`. Returns export, checkpoint, config.json."""
    target = save_tiny_target(folder / "target", tiny_llama_config(**changes))
    run = save_tiny_run(folder / "run", target)
    out = export(ExportConfig(checkpoint=str(run), engine=engine))
    return out, run / "steps" / "000020", json.loads((out / "config.json").read_text())


def set_dtype(target: Path, dtype: torch.dtype) -> None:
    """Store the weights of a tiny target in `dtype`, as its config says."""
    weights = target / "model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    keys = json.loads((target / "config.json").read_text())
    keys["dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(keys))
