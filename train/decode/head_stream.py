"""The head at the end of growing sequences: real pairs in its cache, guessed ones on top."""

import torch
import torch.nn.functional as F
from torch import Tensor

from data.targets.model import TargetHead
from train.head import DraftHead


class HeadStream:
    """The head and its cache for B sequences.

    A round starts from real pairs `(f_j, t_{j+1})`, which the target has confirmed, and goes on
    with guessed ones, `(f̂, drafted token)`. Columns 0 ... length-1 of a sequence's keys and values
    belong to its real pairs; what lies behind is scratch. Guessed pairs are written there and the
    next round's real ones over them: a guessed feature is never kept.
    """

    def __init__(
        self, head: DraftHead, output_head: TargetHead, *, batch_size: int, capacity: int
    ) -> None:
        """capacity: most columns, real pairs and the guessed ones of a round together."""
        kv_heads, dim = head.config.num_key_value_heads, head.config.head_dim
        assert kv_heads and dim  # `draft_config` writes both
        self.head, self.output_head = head, output_head
        shape = (batch_size, kv_heads, capacity, dim)
        self.keys = head.fc.weight.new_zeros(shape)  # masked columns must be finite
        self.values = head.fc.weight.new_zeros(shape)
        self.lengths = [0] * batch_size  # real pairs of each sequence
        self._guessed = 0  # columns of this round's guessed pairs, from max(lengths) on

    def extend(self, features: Tensor, tokens: Tensor, counts: list[int]) -> Tensor:
        """Add real pairs, which follow those in the cache.

        features: [B, T, H]  f_j from the target
        tokens:   [B, T]     t_{j+1}; the last one is the newest token of the sequence
        counts:   [B]        how many of the T are real; padding lies behind them
        returns   [B, H]     the head's output for the last real pair of each sequence
        """
        device = tokens.device
        old = torch.tensor(self.lengths, device=device)
        self.lengths = [n + count for n, count in zip(self.lengths, counts, strict=True)]
        self._guessed = 0
        positions = old[:, None] + torch.arange(tokens.shape[1], device=device)  # [B, T]
        x, query = self._write(features, tokens, positions, start=None)

        last = torch.tensor(counts, device=device) - 1  # [B]
        rows = torch.arange(len(counts), device=device)
        end = max(self.lengths)
        seen = torch.arange(end, device=device) <= (old + last)[:, None]  # [B, end]
        attended = self._attend(query[rows, :, last][:, :, None], seen[:, None])
        return self.head.finish(x[rows, last][:, None], attended)[:, 0]

    def guess(self, features: Tensor, tokens: Tensor, depth: int, seen: Tensor) -> Tensor:
        """Add W guessed pairs at one depth: their features are the head's own.

        features: [B, W, H]  the head's output at the parents
        tokens:   [B, W]     drafted at `depth` (1 is the first guess), as real pairs are
        seen:     [B, W, S]  which of the round's guessed pairs, these W last, each attends to
        returns   [B, W, H]  the head's output, whose logits guess the next depth
        """
        device = tokens.device
        lengths = torch.tensor(self.lengths, device=device)
        base, width = max(self.lengths), tokens.shape[1]
        positions = (lengths + depth - 1)[:, None].expand(-1, width)  # [B, W]
        x, query = self._write(features, tokens, positions, start=base + self._guessed)
        self._guessed += width

        real = torch.arange(base, device=device) < lengths[:, None]  # [B, base]
        seen = torch.cat([real[:, None].expand(-1, width, -1), seen], dim=-1)
        return self.head.finish(x, self._attend(query, seen))

    def keep_rows(self, rows: list[int]) -> None:
        """Go on with some of the sequences only."""
        self.keys, self.values = self.keys[rows], self.values[rows]
        self.lengths = [self.lengths[row] for row in rows]

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., V] float32"""
        return self.output_head.logits(hidden)

    def _write(
        self, features: Tensor, tokens: Tensor, positions: Tensor, *, start: int | None
    ) -> tuple[Tensor, Tensor]:
        """Compute the pairs' keys and values into the columns from `start` on.

        positions: [B, T]
        start:     None: each pair into the column of its own position
        returns    what fc gives [B, T, H], and queries [B, heads, T, d]
        """
        x = self.head.fuse(self.output_head.embed(tokens), features)
        query, key, value = self.head.query_key_value(x, positions)
        if start is None and len(tokens) == 1:
            start = self.lengths[0] - tokens.shape[1]
        if start is None:
            index = positions[:, None, :, None].expand_as(key)
            self.keys.scatter_(2, index, key)
            self.values.scatter_(2, index, value)
        else:
            end = start + tokens.shape[1]
            self.keys[:, :, start:end] = key
            self.values[:, :, start:end] = value
        return x, query

    def _attend(self, query: Tensor, seen: Tensor) -> Tensor:
        """query [B, heads, W, d], seen [B, W, columns] bool -> [B, heads, W, d]"""
        end = seen.shape[-1]
        return F.scaled_dot_product_attention(
            query,
            self.keys[:, :, :end],
            self.values[:, :, :end],
            attn_mask=seen[:, None],
            enable_gqa=True,
        )


def as_served(head: DraftHead, *, device: torch.device, dtype: torch.dtype) -> DraftHead:
    """Put `head` on `device` with weights in `dtype`, as a serving engine runs it.

    The RoPE frequencies are a buffer and stay float32; `head.to(dtype)` would round them.
    """
    head.to(device)
    for parameter in head.parameters():
        parameter.data = parameter.data.to(dtype)
    return head.eval()
