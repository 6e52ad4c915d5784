"""The distillation loss and its gradient in one pass, without ever holding [N, V].

EAGLE (arXiv 2401.15077, section 4.2): Smooth-L1 between the predicted and the real feature, plus
cross-entropy between the distributions that the target's output head makes of them.
"""

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from data.target import TargetHead

CPU_CHUNK_ROWS = 512  # products of fewer rows run well below a core's peak
GPU_CHUNK_ROWS = 2048
CPU_BLOCK_BYTES = 2**21  # element-wise passes go over row blocks of this size, to stay in cache


@dataclass
class LossSums:
    """Sums over the supervised positions; the step divides once by their number everywhere.

    `loss` carries the gradient; the others are for reading.
    """

    loss: Tensor  # []  l1_weight * smooth_l1 + ce_weight * cross_entropy
    smooth_l1: Tensor  # []  averaged over H
    cross_entropy: Tensor  # []  nats
    agreed: Tensor  # []  positions where the head's most likely token is the target's


def distillation_loss(
    predicted: Tensor,
    features: Tensor,
    target_head: TargetHead,
    *,
    l1_weight: float,
    ce_weight: float,
    chunk_rows: int | None = None,
    fuse: bool = False,
) -> LossSums:
    """l1_weight * SmoothL1(f̂, f) + ce_weight * CE(softmax(logits(f)), softmax(logits(f̂))).

    predicted: [N, H]  f̂_{j+1}, at supervised positions only
    features:  [N, H]  f_{j+1}, without gradient
    fuse:      compile the passes over the vocabulary
    returns    sums over the N positions
    """
    dtype = torch.promote_types(predicted.dtype, torch.float32)
    predicted, features = predicted.to(dtype), features.to(dtype)
    smooth_l1 = F.smooth_l1_loss(predicted, features, reduction="none").mean(dim=-1).sum()
    default = CPU_CHUNK_ROWS if predicted.device.type == "cpu" else GPU_CHUNK_ROWS
    cross_entropy, agreed = _ChunkedCrossEntropy.apply(
        predicted, features, target_head, chunk_rows or default, fuse
    )
    loss = l1_weight * smooth_l1 + ce_weight * cross_entropy
    return LossSums(loss, smooth_l1.detach(), cross_entropy.detach(), agreed)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies through a frozen output head.

    The output head is frozen, so all that backward needs is d sum / d predicted, [N, H]. It is
    made in forward, chunk by chunk, while the logits are at hand: three products a position.
    """

    @staticmethod
    def forward(
        ctx, predicted: Tensor, features: Tensor, target_head: TargetHead, chunk: int, fuse: bool
    ):
        gradient = torch.empty_like(predicted)
        total = predicted.new_zeros(())
        agreed = torch.zeros((), dtype=torch.long, device=predicted.device)
        shape = (min(chunk, len(predicted)), len(target_head.weight))
        logit_buffer, target_buffer = predicted.new_empty(shape), predicted.new_empty(shape)
        for start in range(0, len(predicted), chunk):
            rows = predicted[start : start + chunk]
            logits = target_head.logits(rows, out=logit_buffer[: len(rows)])  # [R, V]
            target_logits = target_head.logits(
                features[start : start + chunk], out=target_buffer[: len(rows)]
            )
            for z, target in _blocks(logits, target_logits):
                total_here, agreed_here = _cross_entropy_(
                    z, target, target_head.soft_cap, fuse=fuse
                )
                total += total_here
                agreed += agreed_here
            gradient[start : start + chunk] = logits.to(target_head.weight.dtype) @ (
                target_head.weight
            )
        ctx.save_for_backward(gradient.mul_(target_head.logit_scale))
        ctx.mark_non_differentiable(agreed)
        return total, agreed

    @staticmethod
    def backward(ctx, grad_total: Tensor, _grad_agreed: Tensor):
        (gradient,) = ctx.saved_tensors
        return gradient * grad_total, None, None, None, None


def _blocks(logits: Tensor, target_logits: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both in row blocks that stay in a CPU's cache; whole on a GPU."""
    rows = max(len(logits), 1)
    if logits.device.type == "cpu":
        rows = max(1, CPU_BLOCK_BYTES // (logits.shape[1] * logits.element_size()))
    return zip(logits.split(rows), target_logits.split(rows), strict=True)


def _cross_entropy_(
    z: Tensor, target: Tensor, soft_cap: float | None, *, fuse: bool
) -> tuple[Tensor, Tensor]:
    """Sum of the rows' cross-entropies, and how many rows agree in their argmax.

    `z` becomes the gradient with respect to the logits before the soft cap; `target` is used up.

    z, target: [R, V] float32 logits of the head and of the target
    """
    slope = None if soft_cap is None else 1 - (z / soft_cap) ** 2
    if fuse:
        gradient, total, agreed = _fused(z.device.type)(z, target)
        z.copy_(gradient)
    else:
        total, agreed = _in_place(z, target)
    if slope is not None:
        z.mul_(slope)
    return total, agreed


def _in_place(z: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """CE = log Σ exp(z) - Σ p z, and its gradient softmax(z) - p, with p = softmax(target)."""
    z.sub_(z.amax(dim=-1, keepdim=True))
    target.sub_(target.amax(dim=-1, keepdim=True))
    agreed = ((z == 0) & (target == 0)).any(dim=-1).sum()  # the maxima are at zero now
    target.exp_()
    target_probs = target.div_(target.sum(dim=-1, keepdim=True))
    total = -torch.dot(target_probs.flatten(), z.flatten())
    z.exp_()
    sums = z.sum(dim=-1, keepdim=True)
    total += sums.log().sum()
    z.div_(sums).sub_(target_probs)
    return total, agreed


def _out_of_place(z: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same for a compiler, which makes few passes of it. Returns the gradient first."""
    best, target_best = z.amax(dim=-1, keepdim=True), target.amax(dim=-1, keepdim=True)
    agreed = ((z == best) & (target == target_best)).any(dim=-1).sum()
    z = z - best
    target = (target - target_best).exp()
    scale = 1 / target.sum(dim=-1, keepdim=True)
    dots = (target * z).sum(dim=-1) * scale[:, 0]  # Σ p z
    z = z.exp()
    sums = z.sum(dim=-1, keepdim=True)
    total = (sums.log()[:, 0] - dots).sum()
    return z / sums - target * scale, total, agreed


@functools.cache
def _fused(device: str) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    compiler = os.environ.get("CXX", "g++")
    if device == "cpu" and shutil.which(compiler) is None:
        raise RuntimeError(
            f"loss.fuse=true needs a C++ compiler on a CPU, but there is no {compiler}. Install "
            "one (apt-get install g++), or use loss.fuse=false: only the speed differs."
        )
    return torch.compile(_out_of_place, dynamic=True)
