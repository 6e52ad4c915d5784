"""Drafting in a row: K tokens, each the head's guess after the one before.

EAGLE (arXiv 2401.15077, section 4.1) without the tree; the only form that vLLM drafts.
"""

import torch
from torch import Tensor

from train.decode.children import Choose
from train.decode.head_stream import HeadStream
from train.decode.tree import Tree


def draft_chain(
    stream: HeadStream, hidden: Tensor, newest: Tensor, *, num_steps: int, choose: Choose
) -> Tree:
    """Draft `num_steps` tokens behind the newest one of each sequence.

    hidden: [B, H]  the head's output at the last real pair
    newest: [B]     the token of that pair
    """
    tokens, confidences, probs = [newest[:, None]], [hidden.new_ones(len(newest), 1).float()], []
    hidden = hidden[:, None]  # [B, 1, H]
    for depth in range(num_steps):
        if depth:
            seen = hidden.new_ones(len(newest), 1, depth, dtype=torch.bool)
            hidden = stream.guess(hidden, tokens[-1], depth, seen)
        child = choose(stream.logits(hidden), 1)
        tokens.append(child.tokens[:, :, 0])
        confidences.append(child.confidences[:, :, 0])
        probs.append(child.draft_probs)
    depths = torch.arange(num_steps + 1, device=newest.device).expand(len(newest), -1)
    drawn = [p for p in probs if p is not None]
    return Tree(
        tokens=torch.cat(tokens, dim=1),
        parents=(depths - 1).clamp(min=0),
        depths=depths,
        ranks=torch.zeros_like(depths),
        confidences=torch.cat(confidences, dim=1),
        num_steps=num_steps,
        draft_probs=torch.cat(drawn, dim=1) if drawn else None,
        inner=tuple(range(num_steps)) if drawn else (),
    )
