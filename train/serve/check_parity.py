"""The engine's own module of a head against ours, on the features that the engine fed it."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from train.head import DraftHead

# Largest relative distance of outputs that rounding alone explains, by the engine's dtype.
ROUNDING = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@torch.inference_mode()
def parity(
    file: Path,
    head: DraftHead,
    embed_tokens: Tensor,
    dtype: torch.dtype,
    *,
    window: int | None = None,
) -> dict[str, Any]:
    """How far the engine's output of the head is from ours, in float32, for one prompt.

    file:         what `engine_vllm` wrote: input_ids [T], positions [T], features [T, H] and
                  output [T, H]
    embed_tokens: [V, H]  of the target
    dtype:        that the engine computes in
    window:       of a target whose layers all slide: vLLM's head then does so too, so that only the
                  positions before its end are compared
    """
    seen = {name: tensor[:window] for name, tensor in load_file(file).items()}
    theirs = seen["output"].float()
    embeddings = F.embedding(seen["input_ids"].long(), embed_tokens).float()
    ours = head(embeddings, seen["features"].float(), [len(theirs)])
    positions = seen["positions"].long()
    distance = float((ours - theirs).norm() / ours.norm())
    return {
        "positions": len(theirs),
        # RoPE position of pair j is j, in the engine too
        "positions_equal": positions.tolist() == list(range(len(positions))),
        "max_difference": float((ours - theirs).abs().max()),
        "largest": float(ours.abs().max()),
        "relative_distance": distance,
        "limit": ROUNDING[dtype],
        "close": distance <= ROUNDING[dtype],
    }
