"""What a training step cannot avoid: its matrix products, and attention, each alone."""

from collections.abc import Callable

import torch
from torch import nn

from data.batches import PackedBatch
from train.fit.loss import CPU_CHUNK_ROWS, GPU_CHUNK_ROWS
from train.fit.setup import Run
from train.head import packed_attention


def attention(run: Run, batch: PackedBatch) -> Callable[[], None]:
    """Attention forward and backward over the batch's documents, alone."""
    shape = run.accelerator.unwrap_model(run.head).config
    kv_heads, tokens = shape.num_key_value_heads, sum(batch.lengths)
    sizes = (shape.num_attention_heads, kv_heads, kv_heads)
    query, key, value = (
        torch.randn(n, tokens, shape.head_dim, device=batch.features.device, requires_grad=True)
        for n in sizes
    )

    def attend() -> None:
        packed_attention(query, key, value, batch.lengths).sum().backward()

    return attend


def head_products(run: Run, batch: PackedBatch) -> Callable[[], None]:
    """The products of the head's linear layers on all tokens of a step, alone.

    Each layer has one forward and two backward; `fc` has one backward, as nothing before it is
    trained. Attention's own products are left out.
    """
    head = run.accelerator.unwrap_model(run.head)
    tokens, device = sum(batch.lengths), batch.features.device
    layers = [m for m in head.modules() if isinstance(m, nn.Linear)]
    inputs = [torch.randn(tokens, m.in_features, device=device) for m in layers]
    outputs = [torch.empty(tokens, m.out_features, device=device) for m in layers]
    gradients = [torch.empty_like(m.weight) for m in layers]

    @torch.no_grad()
    def multiply() -> None:
        for layer, x, y, gradient in zip(layers, inputs, outputs, gradients, strict=True):
            torch.mm(x, layer.weight.T, out=y)
            torch.mm(y.T, x, out=gradient)
            if layer is not head.fc:
                torch.mm(y, layer.weight, out=x)

    return multiply


def output_head_products(run: Run, batch: PackedBatch) -> Callable[[], None]:
    """The three products of a step with the output head, on its supervised positions, alone."""
    weight, rows = run.loss_head.weight, run.config.loss.chunk_rows
    rows = rows or (CPU_CHUNK_ROWS if weight.device.type == "cpu" else GPU_CHUNK_ROWS)
    features = torch.randn(len(batch.supervised), weight.shape[1], device=weight.device)
    features = features.to(weight.dtype)
    logits = features.new_empty(min(rows, len(features)), len(weight))
    gradients = torch.empty_like(features[:rows])

    @torch.no_grad()
    def multiply() -> None:
        for chunk in features.split(rows):
            for _ in ("the target's logits", "the head's"):
                torch.mm(chunk, weight.T, out=logits[: len(chunk)])
            torch.mm(logits[: len(chunk)], weight, out=gradients[: len(chunk)])

    return multiply
