"""One optimizer step: the same update however its sequences are cut and shared out."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.tensor import DTensor

from data.batches import PackedBatch, add_noise
from data.files import write_json
from train.fit.loss import LossSums, distillation_loss
from train.fit.plan import Step
from train.fit.setup import Run
from train.fit.unroll import chain_rows


def train_step(run: Run, step: Step, micro_batches: list[PackedBatch]) -> tuple[Tensor, float]:
    """Accumulate gradients over this process's `micro_batches`, then update once.

    Both loss terms are divided by the supervised pairs of all processes, so that the update does
    not depend on how the step was cut.

    returns  [3] smooth-L1, cross-entropy and agreement, means over all processes' pairs; the
             gradient's norm before clipping
    """
    accelerator = run.accelerator
    is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    sums = torch.zeros(4, device=accelerator.device)
    for i, cpu_batch in enumerate(micro_batches):
        is_last = i == len(micro_batches) - 1
        loss = batch_loss(run, cpu_batch.to(accelerator.device), step.epoch)
        terms = [loss.smooth_l1, loss.cross_entropy, loss.agreed.float(), loss.loss.detach()]
        sums += torch.stack(terms)
        if is_last:
            sums = accelerator.reduce(sums, "sum") / step.num_supervised
            stop_if_not_finite(sums, "loss", run, step)
        accelerator.gradient_state._set_sync_gradients(is_last)  # DeepSpeed steps when it is set
        with nullcontext() if is_last or is_deepspeed else accelerator.no_sync(run.head):
            # DDP and ZeRO average over processes, the loss is a sum
            scale = accelerator.num_processes / step.num_supervised
            accelerator.backward(loss.loss * scale)
    norm = accelerator.clip_grad_norm_(run.head.parameters(), run.config.max_grad_norm)
    grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    stop_if_not_finite(torch.tensor(grad_norm), "gradient", run, step)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return sums[:3], grad_norm


def batch_loss(run: Run, batch: PackedBatch, epoch: int) -> LossSums:
    """Forward one packed batch, with noise on the input features only.

    With unroll=K the loss is (1/K) Σ_n Σ_s of the same two terms over the K steps n of each chain
    s, a chain that has left its reply adding nothing. HASS sums over the steps instead, which
    differs by the factor K: only the clipping of gradients notices.
    """
    config = run.config
    features = add_noise(
        batch, kind=config.noise, width=config.noise_width, seed=config.seed, epoch=epoch
    )
    dtype = next(run.head.parameters()).dtype  # float32, or what DeepSpeed made of it
    inputs = run.loss_head.embed(batch.next_ids).to(dtype), features.to(dtype), batch.lengths
    loss_of = partial(
        distillation_loss,
        target_head=run.loss_head,
        l1_weight=config.loss.l1_weight,
        ce_weight=config.loss.ce_weight,
        top_k=config.loss.top_k,
        top_k_weight=config.loss.top_k_weight,
        chunk_rows=config.loss.chunk_rows,
        fuse=config.loss.fuse,
    )
    if config.unroll == 1:
        with run.accelerator.autocast():
            predicted = run.head(*inputs)  # [T, H]
        return loss_of(predicted[batch.supervised], batch.target_features)

    with run.accelerator.autocast():
        drafted = run.head(*inputs, batch.supervised, config.unroll)  # [K, N, H]
    chains = chain_rows(batch.supervised, batch.lengths, num_steps=config.unroll)
    steps = [
        loss_of(drafted[n, rows], batch.target_features[rows + n]) for n, rows in enumerate(chains)
    ]
    # Every step weighs the same, and what is read of a run stays step 1's whatever K is.
    return replace(steps[0], loss=torch.stack([step.loss for step in steps]).mean())


class NotFiniteError(RuntimeError):
    """A loss or a gradient is nan or infinite. The weights are those before the step."""


def stop_if_not_finite(values: Tensor, what: str, run: Run, step: Step) -> None:
    """Raise on every process, and leave the step's conversations in OUT/nonfinite.json.

    values: the same on all processes
    """
    if torch.isfinite(values).all():
        return
    ids = [run.cache.ids[index] for index in step.sequences]
    file = Path(run.config.out) / "nonfinite.json"
    if run.accelerator.is_main_process:
        write_json(file, {"step": step.number, "what": what, "conversations": ids})
    run.accelerator.wait_for_everyone()  # a launcher ends all processes when the first one ends
    raise NotFiniteError(
        f"The {what} of step {step.number} is not finite ({values.tolist()}). The checkpoints "
        f"before it are unharmed. The step's {len(ids)} conversations are listed in {file}. Check "
        f"the cache, or lower lr (now {run.config.lr})."
    )
