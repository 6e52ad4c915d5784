"""The distillation loss and its gradient in one pass, without ever holding [N, V].

EAGLE (arXiv 2401.15077, section 4.2): Smooth-L1 between the predicted and the real feature, plus
cross-entropy between the distributions that the target's output head makes of them.
"""

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
) -> LossSums:
    """l1_weight * SmoothL1(f̂, f) + ce_weight * CE(softmax(logits(f)), softmax(logits(f̂))).

    predicted: [N, H]  f̂_{j+1}, at supervised positions only
    features:  [N, H]  f_{j+1}, without gradient
    returns    sums over the N positions
    """
    dtype = torch.promote_types(predicted.dtype, torch.float32)
    predicted, features = predicted.to(dtype), features.to(dtype)
    smooth_l1 = F.smooth_l1_loss(predicted, features, reduction="none").mean(dim=-1).sum()
    default = CPU_CHUNK_ROWS if predicted.device.type == "cpu" else GPU_CHUNK_ROWS
    cross_entropy, agreed = _ChunkedCrossEntropy.apply(
        predicted, features, target_head, chunk_rows or default
    )
    loss = l1_weight * smooth_l1 + ce_weight * cross_entropy
    return LossSums(loss, smooth_l1.detach(), cross_entropy.detach(), agreed)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies through a frozen output head.

    The output head is frozen, so all that backward needs is d sum / d predicted, [N, H]. It is
    made in forward, chunk by chunk, while the logits are at hand: three products a position.
    """

    @staticmethod
    def forward(ctx, predicted: Tensor, features: Tensor, target_head: TargetHead, chunk: int):
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
            total_here, agreed_here = _cross_entropy_(logits, target_logits, target_head.soft_cap)
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
        return gradient * grad_total, None, None, None


def _cross_entropy_(
    logits: Tensor, target_logits: Tensor, soft_cap: float | None
) -> tuple[Tensor, Tensor]:
    """Sum of the rows' cross-entropies, and how many rows agree in their argmax.

    In place: `logits` becomes the gradient with respect to the logits before the soft cap, and
    `target_logits` the target's probabilities.

    logits, target_logits: [R, V] float32
    """
    total = logits.new_zeros(())
    agreed = torch.zeros((), dtype=torch.long, device=logits.device)
    block_rows = len(logits)
    if logits.device.type == "cpu":
        block_rows = max(1, CPU_BLOCK_BYTES // (logits.shape[1] * logits.element_size()))
    for z, target in zip(logits.split(block_rows), target_logits.split(block_rows), strict=True):
        slope = None if soft_cap is None else 1 - (z / soft_cap) ** 2
        z.sub_(z.amax(dim=-1, keepdim=True))
        target.sub_(target.amax(dim=-1, keepdim=True))
        agreed += ((z == 0) & (target == 0)).any(dim=-1).sum()  # the maxima are at zero now
        target.exp_()
        target_probs = target.div_(target.sum(dim=-1, keepdim=True))
        # CE = log Σ exp(z) - Σ p z, and its gradient is softmax(z) - p
        total -= torch.dot(target_probs.flatten(), z.flatten())
        z.exp_()
        sums = z.sum(dim=-1, keepdim=True)
        total += sums.log().sum()
        z.div_(sums).sub_(target_probs)
        if slope is not None:
            z.mul_(slope)
    return total, agreed
