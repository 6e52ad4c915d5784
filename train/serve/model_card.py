"""The README.md inside an exported folder: what the head is, how it was made, how to serve it."""

import json
import shlex
from pathlib import Path
from typing import Any

from data.files import read_json
from data.origin import describe_replies
from train.serve.engine_config import ENGINE_NAMES

CARD = """\
# EAGLE draft head for {target}

A draft head for speculative decoding in {engine_name}: one Llama decoder layer that guesses the
target's next tokens from the target's own hidden states. The target checks every guess, so its
output stays what it is without the head; only the speed changes.

- **Method `eagle`, not `eagle3`.** EAGLE-1 and EAGLE-2 share this head; they differ in how drafts
  are arranged when serving. Engines load it as method `eagle`.
- **Llama-shaped by design**, whatever family the target is: that is the layer that engines build
  for `eagle` heads. The target is a `{model_type}` model.
- **For this target only.** Embeddings and output head are the target's own and not in this
  folder. With other weights, another tokenizer or another chat template it loads as well, and
  guesses worse.

## Serve

```
{command}
```

The paths are those of the machine that exported the head; replace them if the folder has moved.

## Acceptance

{acceptance}

## How it was made

Step {step} of a run with these settings. Weights were trained in float32 and converted once to
{dtype}, the target's dtype{bias_note}.

{settings}

Features: {cache}

Replies in the chats: {replies}.

## Target fingerprint

{fingerprint}

## Files

| file | read by |
|---|---|
| `config.json`, `model.safetensors` | {engine_name} |
| `eagle_head.json` | the tools that made this folder: origin, fingerprint, acceptance |

Add no other weights file: engines load every one they find.
"""


def model_card(origin: dict[str, Any], path: Path, target: str) -> str:
    """The card of the head at `path`. origin: what eagle_head.json holds."""
    engine = origin["engine"]
    return CARD.format(
        target=target,
        engine_name=ENGINE_NAMES[engine],
        model_type=origin["fingerprint"].get("model_type", "?"),
        command=_serve_command(path, target, engine, dtype=origin["dtype"], num_steps=3),
        acceptance=_acceptance(origin["acceptance"]),
        step=origin["step"],
        dtype=origin["dtype"],
        bias_note=", and `fc.bias` is zero: SGLang needs one" if engine == "sglang" else "",
        settings=_table("setting", _flatten(origin["settings"] or {})),
        cache=json.dumps(origin["cache"], ensure_ascii=False),
        replies=describe_replies(origin["replies"], origin["fingerprint"]),
        fingerprint=_table("field", origin["fingerprint"]),
    )


def serve_command(path: Path, target: str, engine: str, *, num_steps: int = 3) -> str:
    """The shell command that serves `target` with the exported head at `path`."""
    config = read_json(path / "config.json", made_by="python -m scripts.export_head")
    return _serve_command(path, target, engine, dtype=config["torch_dtype"], num_steps=num_steps)


def _serve_command(path: Path, target: str, engine: str, *, dtype: str, num_steps: int) -> str:
    if engine == "vllm":
        speculative = {"method": "eagle", "model": str(path), "num_speculative_tokens": num_steps}
        words = ["vllm", "serve", target, "--speculative-config", json.dumps(speculative)]
    else:
        words = ["python", "-m", "sglang.launch_server", "--model-path", target]
        words += ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(path)]
        words += ["--speculative-num-steps", str(num_steps), "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-draft-tokens", str(num_steps + 1)]
    if dtype == "float32":
        words += ["--dtype", "float32"]  # engines take half precision for it by default
    return shlex.join(words)


def _acceptance(measured: dict[str, Any] | None) -> str:
    if not measured:
        return "Not measured: the run kept no conversations out of training."
    steps = " ".join(f"α_{n} = {rate:.3f}" for n, rate in enumerate(measured["alpha"], start=1))
    between = measured.get("interval")
    interval = f" [{between[0]:.2f}, {between[1]:.2f}]" if between else ""
    return (
        f"**τ = {measured['acceptance_length']:.2f}**{interval} tokens per target forward, greedy "
        f"chain of {len(measured['alpha'])}; {steps}.\n\n"
        "Estimated on conversations held out of training, with a 95 % confidence interval where "
        "they are several. α_n is the share of tried draft tokens n "
        "that equal the target's own greedy token, given that draft tokens 1 … n-1 did; "
        "τ = 1 + Σ_n Π_{i≤n} α_i, the bonus token included, as the engines count. (The papers "
        "count the bonus token as an always accepted first draft token.)"
    )


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _table(name: str, rows: dict[str, Any]) -> str:
    lines = [f"| {name} | value |", "|---|---|"]
    return "\n".join(lines + [f"| `{key}` | `{value}` |" for key, value in rows.items()])
