"""The distillation loss and its gradient in one pass, without ever holding [N, V].

EAGLE (arXiv 2401.15077, section 4.2): Smooth-L1 between the predicted and the real feature, plus
cross-entropy between the distributions that the target's output head makes of them. On request
HASS's top-K term too (arXiv 2408.15766, section 3.1): the cross-entropy's K summands where the
target's probability is highest, once more.
"""

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from data.targets.model import TargetHead

CPU_CHUNK_ROWS = 512  # products of fewer rows run well below a core's peak
GPU_CHUNK_ROWS = 2048
CPU_BLOCK_BYTES = 2**21  # element-wise passes go over row blocks of this size, to stay in cache


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What the terms over the vocabulary count."""

    cross_entropy: float
    top_k: int = 0  # tokens of the top-K term; 0: without it
    top_k_term: float = 0.0


@dataclass
class LossSums:
    """Sums over the supervised positions; the step divides once by their number everywhere.

    `loss` carries the gradient; the others are for reading.
    """

    loss: Tensor  # []  l1_weight * smooth_l1 + ce_weight * cross_entropy, and the top-K term
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
    top_k: int = 0,
    top_k_weight: float = 1.0,
    chunk_rows: int | None = None,
    fuse: bool = False,
) -> LossSums:
    """l1_weight * SmoothL1(f̂, f) + ce_weight * CE(softmax(logits(f)), softmax(logits(f̂))).

    With top_k=K also top_k_weight * -Σ_x p(x) log q(x) over the K tokens x of highest p, where p is
    the target's and q the head's distribution (HASS).

    predicted: [N, H]  f̂_{j+1}, at supervised positions only
    features:  [N, H]  f_{j+1}, without gradient
    fuse:      compile the passes over the vocabulary
    returns    sums over the N positions
    """
    weights = Weights(cross_entropy=ce_weight, top_k=top_k, top_k_term=top_k_weight)
    dtype = torch.promote_types(predicted.dtype, torch.float32)
    predicted, features = predicted.to(dtype), features.to(dtype)
    smooth_l1 = F.smooth_l1_loss(predicted, features, reduction="none").mean(dim=-1).sum()
    default = CPU_CHUNK_ROWS if predicted.device.type == "cpu" else GPU_CHUNK_ROWS
    weighted, cross_entropy, agreed = _ChunkedCrossEntropy.apply(
        predicted, features, target_head, weights, chunk_rows or default, fuse
    )
    loss = l1_weight * smooth_l1 + weighted
    return LossSums(loss, smooth_l1.detach(), cross_entropy, agreed)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of weighted cross-entropies through a frozen output head; also the sum without weights.

    The output head is frozen, so all that backward needs is d sum / d predicted, [N, H]. It is
    made in forward, chunk by chunk, while the logits are at hand: three products a position.
    """

    @staticmethod
    def forward(
        ctx,
        predicted: Tensor,
        features: Tensor,
        target_head: TargetHead,
        weights: Weights,
        chunk: int,
        fuse: bool,
    ):
        gradient = torch.empty_like(predicted)
        weighted, cross_entropy = predicted.new_zeros(()), predicted.new_zeros(())
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
                sums = _cross_entropy_(z, target, weights, target_head.soft_cap, fuse=fuse)
                weighted += sums[0]
                cross_entropy += sums[1]
                agreed += sums[2]
            gradient[start : start + chunk] = logits.to(target_head.weight.dtype) @ (
                target_head.weight
            )
        # One weight for the whole of it waits until here, where there are H columns and not V.
        weight = 1.0 if weights.top_k else weights.cross_entropy
        ctx.save_for_backward(gradient.mul_(target_head.logit_scale * weight))
        ctx.mark_non_differentiable(cross_entropy, agreed)
        return weighted, cross_entropy, agreed

    @staticmethod
    def backward(ctx, grad_weighted: Tensor, *_: Tensor):
        (gradient,) = ctx.saved_tensors
        return gradient * grad_weighted, None, None, None, None, None


def _blocks(logits: Tensor, target_logits: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both in row blocks that stay in a CPU's cache; whole on a GPU."""
    rows = max(len(logits), 1)
    if logits.device.type == "cpu":
        rows = max(1, CPU_BLOCK_BYTES // (logits.shape[1] * logits.element_size()))
    return zip(logits.split(rows), target_logits.split(rows), strict=True)


def _cross_entropy_(
    z: Tensor, target: Tensor, weights: Weights, soft_cap: float | None, *, fuse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of some rows: the weighted sum, the sum of cross-entropies, how many agree in their argmax.

    `z` becomes the gradient with respect to the logits before the soft cap: of the weighted sum
    if there is a top-K term, else of the sum of cross-entropies. `target` is used up.

    z, target: [R, V] float32 logits of the head and of the target
    """
    slope = None if soft_cap is None else 1 - (z / soft_cap) ** 2
    if weights.top_k:
        run = _fused(_with_top_k, z.device.type) if fuse else _with_top_k
        gradient, weighted, total, agreed = run(
            z, target, weights.top_k, weights.cross_entropy, weights.top_k_term
        )
        z.copy_(gradient)
    else:
        if fuse:
            gradient, total, agreed = _fused(_out_of_place, z.device.type)(z, target)
            z.copy_(gradient)
        else:
            total, agreed = _in_place(z, target)
        weighted = weights.cross_entropy * total
    if slope is not None:
        z.mul_(slope)
    return weighted, total, agreed


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


def _with_top_k(
    z: Tensor, target: Tensor, top_k: int, ce_weight: float, top_k_weight: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """With the top-K term: gradient, weighted sum, sum of cross-entropies, equal argmaxes.

    d/dz of -Σ_{x in K} p log q is (Σ_{x in K} p) q - p·[x in K].
    """
    log_probs, target_probs = z.log_softmax(dim=-1), target.softmax(dim=-1)
    best = target_probs.topk(top_k, dim=-1)
    # On the logits, as without the term: rounding makes equals of probabilities.
    z_best, target_best = z.amax(dim=-1, keepdim=True), target.amax(dim=-1, keepdim=True)
    agreed = ((z == z_best) & (target == target_best)).any(dim=-1).sum()
    total = -(target_probs * log_probs).sum()
    top_k_sum = -(best.values * log_probs.gather(-1, best.indices)).sum()
    mass = best.values.sum(dim=-1, keepdim=True)
    gradient = log_probs.exp() * (ce_weight + top_k_weight * mass) - ce_weight * target_probs
    gradient = gradient.scatter_add(-1, best.indices, -top_k_weight * best.values)
    return gradient, ce_weight * total + top_k_weight * top_k_sum, total, agreed


@functools.cache
def _fused(function: Callable, device: str) -> Callable:
    compiler = os.environ.get("CXX", "g++")
    if device == "cpu" and shutil.which(compiler) is None:
        raise RuntimeError(
            f"loss.fuse=true needs a C++ compiler on a CPU, but there is no {compiler}. Install "
            "one (apt-get install g++), or use loss.fuse=false: only the speed differs."
        )
    return torch.compile(function, dynamic=True)
