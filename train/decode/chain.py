"""Drafting: the head guesses K tokens in a row (EAGLE, arXiv 2401.15077, section 4.1).

A round starts from real pairs `(f_j, t_{j+1})`, which the target has confirmed, and goes on with
guessed ones, `(f̂, drafted token)`. Only real pairs stay in the cache: a guessed feature is never
kept once the real one is known.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from data.target import TargetHead
from train.head import DraftHead


class DraftCache:
    """Keys and values of the head's one layer: rows 0 ... length-1 belong to real pairs.

    Rows from `length` on are scratch. A round's guessed pairs are written there and the next
    round's real ones go over them, so nothing is ever copied or cropped.
    """

    def __init__(self, head: DraftHead, capacity: int) -> None:
        kv_heads, dim = head.config.num_key_value_heads, head.config.head_dim
        assert kv_heads and dim  # `draft_config` writes both
        shape = (kv_heads, capacity, dim)
        self.keys = head.fc.weight.new_empty(shape)
        self.values = head.fc.weight.new_empty(shape)
        self.length = 0


def draft_chain(
    head: DraftHead,
    output_head: TargetHead,
    cache: DraftCache,
    features: Tensor,
    tokens: Tensor,
    *,
    num_steps: int,
) -> tuple[Tensor, Tensor]:
    """Extend `cache` by real pairs, then draft `num_steps` tokens greedily.

    The pairs are those that follow the cached ones; the last token is the newest of the sequence,
    whose own feature the target does not know yet.

    features: [T, H]  f_j from the target
    tokens:   [T]     t_{j+1}
    returns   [K]     drafted tokens, and the head's probabilities of them; on the device, nothing
                      here waits for it
    """
    hidden = _last_output(head, cache, output_head.embed(tokens), features, start=cache.length)
    cache.length += len(tokens)
    drafted: list[Tensor] = []
    confidences: list[Tensor] = []
    for step in range(num_steps):
        if step:
            embedding = output_head.embed(drafted[-1])
            hidden = _last_output(head, cache, embedding, hidden, start=cache.length + step - 1)
        best, token = output_head.logits(hidden).softmax(dim=-1).max(dim=-1)
        drafted.append(token)
        confidences.append(best)
    return torch.cat(drafted), torch.cat(confidences)


def _last_output(
    head: DraftHead, cache: DraftCache, embeddings: Tensor, features: Tensor, *, start: int
) -> Tensor:
    """The head's output for the last of some pairs at positions `start` ...: [T, H] -> [1, H].

    Earlier pairs only leave their keys and values behind, so one query row is enough, and that
    row sees everything before it: no mask.
    """
    x = head.fuse(embeddings, features)
    end = start + len(x)
    positions = torch.arange(start, end, device=x.device)
    query, key, value = head.query_key_value(x, positions)
    cache.keys[:, start:end] = key
    cache.values[:, start:end] = value
    attended = F.scaled_dot_product_attention(
        query[None, :, -1:],
        cache.keys[None, :, :end],
        cache.values[None, :, :end],
        enable_gqa=True,
    )
    return head.finish(x[-1:], attended[0])


def as_served(head: DraftHead, *, device: torch.device, dtype: torch.dtype) -> DraftHead:
    """Put `head` on `device` with weights in `dtype`, as a serving engine runs it.

    The RoPE frequencies are a buffer and stay float32; `head.to(dtype)` would round them.
    """
    head.to(device)
    for parameter in head.parameters():
        parameter.data = parameter.data.to(dtype)
    return head.eval()
