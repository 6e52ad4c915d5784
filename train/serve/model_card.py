"""The README.md inside an exported folder: what the head is, how it was made, how to serve it."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.files import atomic_write, read_json
from data.replies.origin import describe_replies
from train.serve.engine_config import ENGINE_NAMES, WEIGHTS
from train.serve.folder import RECORD

NOTHING_SHARED = "Embeddings and output head are the target's own and not in this folder."
COPY_SHARED = (
    "The output head is the target's own and not in this folder; the embeddings are a copy of the "
    "target's, which the repository's loader asks for."
)
CARD = """\
# EAGLE draft head for {target}

A draft head for speculative decoding in {engine_name}: one Llama decoder layer that guesses the
target's next tokens from the target's own hidden states. The target checks every guess, so its
output stays what it is without the head; only the speed changes.

- **Method `eagle`, not `eagle3`.** EAGLE-1 and EAGLE-2 share this head; they differ in how drafts
  are arranged when serving. Engines load it as method `eagle`.
- **Llama-shaped by design**, whatever family the target is: that is the layer that engines build
  for `eagle` heads. The target is a `{model_type}` model.
- **For this target only.** {shared} With other weights, another tokenizer or another chat template
  it loads as well, and guesses worse.

## Serve

```
{command}
```

{drafting}

The paths are those of the machine that exported the head; replace them if the folder has moved.

## Acceptance

{acceptance}

## How it was made

{made}

## Target fingerprint

{fingerprint}

## Files

| file | read by |
|---|---|
| `config.json`, `{weights}` | {engine_name} |
| `eagle_head.json` | the tools that made this folder: origin, fingerprint, acceptance |

Add no other weights file: engines load every one they find.
"""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """What drafts look like when serving, and who says so."""

    num_steps: int = 3
    topk: int = 1
    num_draft_tokens: int = 4
    measured: str | None = None  # the report that found it best; None: a usual start


def measured_tree(folder: Path) -> dict[str, Tree]:
    """The drafting that `evaluate_head tree=auto` found best for this head, for each engine.

    folder: the export, with its evaluation/report.json if there is one
    """
    file = folder / "evaluation" / "report.json"
    report = read_json(file, made_by="python -m scripts.evaluate_head") if file.is_file() else {}
    found = {}
    # vLLM drafts chains only.
    for engine, key in (("vllm", "best_chain"), ("sglang", "best_tree"), ("eagle", "best_tree")):
        if best := report.get(key):
            found[engine] = Tree(
                num_steps=best["speculative_num_steps"],
                topk=best["speculative_eagle_topk"],
                num_draft_tokens=best["speculative_num_draft_tokens"],
                measured="evaluation/report.json",
            )
    return found


def write_card(folder: Path, target: str) -> None:
    """Write the card of an export anew, with what has been measured on it since."""
    origin = read_json(folder / RECORD, made_by="python -m scripts.export_head")
    card = model_card(origin, folder, target, tree=measured_tree(folder))
    with atomic_write(folder / "README.md") as tmp:
        tmp.write_text(card, encoding="utf-8")


def model_card(
    origin: dict[str, Any], path: Path, target: str, *, tree: dict[str, Tree] | None = None
) -> str:
    """The card of the head at `path`. origin: what eagle_head.json holds."""
    engine = origin["engine"]
    shape = (tree or {}).get(engine, Tree())
    return CARD.format(
        target=target,
        engine_name=ENGINE_NAMES[engine],
        weights=WEIGHTS[engine],
        model_type=origin["fingerprint"].get("model_type", "?"),
        shared=COPY_SHARED if engine == "eagle" else NOTHING_SHARED,
        command=_serve_command(path, target, engine, dtype=origin["dtype"], tree=shape),
        drafting=_drafting(engine, shape),
        acceptance=_acceptance(origin["acceptance"]),
        made=_made(origin),
        fingerprint=_table("field", origin["fingerprint"]),
    )


def serve_command(
    path: Path,
    target: str,
    engine: str,
    *,
    num_steps: int = 3,
    tree: dict[str, Tree] | None = None,
) -> str:
    """The shell command that serves `target` with the exported head at `path`.

    num_steps: of a chain, where nothing measured (`tree`) says otherwise
    """
    config = read_json(path / "config.json", made_by="python -m scripts.export_head")
    chain = Tree(num_steps=num_steps, num_draft_tokens=num_steps + 1)
    shape = (tree or {}).get(engine, chain)
    return _serve_command(path, target, engine, dtype=config["torch_dtype"], tree=shape)


def _serve_command(path: Path, target: str, engine: str, *, dtype: str, tree: Tree) -> str:
    if engine == "vllm":
        speculative = {
            "method": "eagle",
            "model": str(path),
            "num_speculative_tokens": tree.num_steps,
        }
        words = ["vllm", "serve", target, "--speculative-config", json.dumps(speculative)]
    elif engine == "sglang":
        words = ["python", "-m", "sglang.launch_server", "--model-path", target]
        words += ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(path)]
        words += ["--speculative-num-steps", str(tree.num_steps)]
        words += ["--speculative-eagle-topk", str(tree.topk)]
        words += ["--speculative-num-draft-tokens", str(tree.num_draft_tokens)]
    else:
        words = ["python", "-m", "eagle.application.webui", "--base-model-path", target]
        return shlex.join([*words, "--ea-model-path", str(path)])
    if dtype == "float32":
        words += ["--dtype", "float32"]  # engines take half precision for it by default
    return shlex.join(words)


def _drafting(engine: str, tree: Tree) -> str:
    if engine == "eagle":
        return "The shape of drafts is the repository's own setting."
    what = f"{tree.num_steps} draft steps"
    if tree.topk > 1:
        what += f", {tree.topk} children a node, {tree.num_draft_tokens} tokens in the tree"
    if tree.measured:
        return f"{what}: the fastest of those tried on the evaluating machine ({tree.measured})."
    return (
        f"{what}: a usual start, not measured. `evaluate_head tree=auto` finds what is fastest "
        "on a machine."
    )


def _made(origin: dict[str, Any]) -> str:
    """Who trained the head and how, as far as that is known."""
    dtype = f"{origin['dtype']}, the target's dtype"
    if origin["engine"] == "sglang" and not origin["fc_bias"]:
        dtype += ", and `fc.bias` is zero: SGLang needs one"
    if origin.get("published"):
        return (
            f"A published head, read from `{origin['source']}` and converted to {dtype}. How it "
            "was trained, and whether for exactly this target, its folder does not say."
        )
    return (
        f"Step {origin['step']} of a run with these settings. Weights were trained in float32 and "
        f"converted once to {dtype}.\n\n"
        f"{_table('setting', _flatten(origin['settings'] or {}))}\n\n"
        f"Features: {json.dumps(origin['cache'], ensure_ascii=False)}\n\n"
        f"Replies in the chats: {describe_replies(origin['replies'], origin['fingerprint'])}."
    )


def _acceptance(measured: dict[str, Any] | None) -> str:
    if not measured:
        return (
            "Not measured: no conversations were kept out of training, or it was not trained here."
        )
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
