"""The target at the end of growing sequences, and over the trees that are guessed on top.

Any causal language model of Transformers does, unmodified: it takes a 4-D mask as it is, explicit
positions, and a cache whose rows can be moved.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from data.targets.model import Target
from train.decode.tree import Tree, padded


class TargetStream:
    """The target and its cache for B sequences of different lengths.

    Columns 0 ... length-1 of a sequence's keys and values are its tokens, so that a column is a
    position. New tokens of all sequences are written behind the longest one; `keep` moves those
    that stay to the end of their own sequence, and what lies behind is never read.
    """

    def __init__(self, target: Target, batch_size: int = 1) -> None:
        self._target = target
        self._backbone = target.model.get_decoder()
        # Without a config every layer keeps all its rows, also a sliding-window one (its mask
        # cuts the window): rejected rows can be dropped at any length.
        self._cache = DynamicCache()
        self._windows = _windows(target.model.config.get_text_config())
        self.lengths = [0] * batch_size

    def append(self, tokens: Tensor, counts: list[int] | None = None) -> Tensor:
        """Run the target over the next tokens of each sequence, and keep them.

        tokens: [B, T]
        counts: [B]        real tokens of each sequence, padding behind them; None: all
        returns [B, T, H]  features; those of padding mean nothing
        """
        batch_size, width = tokens.shape
        if batch_size == 1:  # the model's own causal mask is the right one
            features = self._forward(tokens)
            self.lengths[0] += width
            return features
        steps = torch.arange(width, device=tokens.device)
        causal = (steps <= steps[:, None]).expand(batch_size, -1, -1)
        features = self._masked(tokens, steps.expand(batch_size, -1), causal)
        self.keep([list(range(count)) for count in counts or [width] * batch_size], width=width)
        return features

    def try_tree(self, tree: Tree) -> Tensor:
        """Run the target over all nodes at once: [B, N, H]. `keep` must say which of them stay."""
        if len(tree.tokens) == 1 and tree.tokens.shape[1] == tree.num_steps + 1:  # a chain
            return self._forward(tree.tokens)
        return self._masked(tree.tokens, tree.depths, tree.ancestors())

    def keep(self, paths: Sequence[Sequence[int]], *, width: int) -> None:
        """Keep some of the `width` newest columns of each sequence, and forget the others.

        paths: [B][*]  which ones, in order
        """
        base = max(self.lengths)  # where the newest columns begin
        moved = any(
            base + column != length + place
            for path, length in zip(paths, self.lengths, strict=True)
            for place, column in enumerate(path)
        )
        if moved:
            device = self._target.device
            source = base + padded(paths, device)  # [B, D]
            places = torch.arange(source.shape[1], device=device)
            goal = torch.tensor(self.lengths, device=device)[:, None] + places
            for layer in self._layers:
                _move(layer.keys, source, goal)
                _move(layer.values, source, goal)
        self.lengths = [n + len(path) for n, path in zip(self.lengths, paths, strict=True)]
        self._cache.crop(max(self.lengths) - base - width)

    def keep_rows(self, rows: list[int]) -> None:
        """Go on with some of the sequences only."""
        self.lengths = [self.lengths[row] for row in rows]
        longest = max(self.lengths)
        for layer in self._layers:
            layer.keys = layer.keys[rows, :, :longest]
            layer.values = layer.values[rows, :, :longest]

    @property
    def _layers(self) -> list[Any]:
        return self._cache.layers

    def _masked(self, tokens: Tensor, depths: Tensor, ancestors: Tensor) -> Tensor:
        """Run new tokens that each see their sequence and some of the new tokens.

        tokens:    [B, N]
        depths:    [B, N]     how far behind the sequence's last token, from 0 on
        ancestors: [B, N, N]  which of the new tokens each one sees
        """
        lengths = torch.tensor(self.lengths, device=tokens.device)[:, None]  # [B, 1]
        columns = torch.arange(max(self.lengths), device=tokens.device)
        positions = lengths + depths  # [B, N]
        seen = (columns < lengths)[:, None].expand(-1, tokens.shape[1], -1)  # [B, N, C]
        seen = torch.cat([seen, ancestors], dim=-1)  # [B, N, C+N]
        reach = torch.cat([columns.expand(len(tokens), -1), positions], dim=-1)  # [B, C+N]
        distance = positions[:, :, None] - reach[:, None]  # [B, N, C+N]
        masks = {
            kind: self._additive(seen if window is None else seen & (distance < window))
            for kind, window in self._windows.items()
        }
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        return self._forward(tokens, attention_mask=mask, position_ids=positions)

    def _additive(self, seen: Tensor) -> Tensor:
        """A mask that all attention implementations but flash attention take: [B, 1, N, C+N]."""
        dtype = self._target.dtype
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]

    def _forward(self, tokens: Tensor, **arguments) -> Tensor:
        output = self._backbone(
            input_ids=tokens, past_key_values=self._cache, use_cache=True, **arguments
        )
        return output.last_hidden_state.to(self._target.device)


def _windows(config) -> dict[str, int | None]:
    """How far back the kinds of layers see: None is everything.

    A model whose config lists the types of its layers takes one mask for each; all others take
    one mask, and have one window or none.
    """
    window = getattr(config, "sliding_window", None) or None
    types = getattr(config, "layer_types", None)
    if types is None:
        return {"all layers": window}
    if "sliding_attention" not in types:
        return {"full_attention": None}
    return {"full_attention": None, "sliding_attention": window}


def _move(rows: Tensor, source: Tensor, goal: Tensor) -> None:
    """Copy columns of keys or values [B, heads, C, d] in place; source and goal: [B, D]."""
    shape = (-1, rows.shape[1], -1, rows.shape[3])
    source, goal = (index.to(rows.device)[:, None, :, None] for index in (source, goal))
    rows.scatter_(2, goal.expand(shape), rows.gather(2, source.expand(shape)))
