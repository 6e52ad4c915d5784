"""What a run needs before its first step: the head, the optimizer, the held-out documents."""

from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from data.batches import pack, split_step
from data.cache.reader import FeatureCache
from data.config import TargetConfig
from data.targets.fingerprint import fingerprint, fingerprint_differences
from data.targets.model import TargetHead, load_config
from train.acceptance import HeldoutBatch, prepare_batch
from train.config import TrainConfig
from train.fit.checkpoints import load_weights, restore
from train.fit.initialise import initialise
from train.fit.vocabulary import frequent_head
from train.head import DraftHead, draft_config

HELDOUT_TOKENS = 4096  # of one batch of an estimate


@dataclass(kw_only=True)
class Run:
    """All that a step works with, prepared for this process."""

    accelerator: Accelerator
    config: TrainConfig
    cache: FeatureCache
    target_head: TargetHead  # the whole output head: what acceptance is measured with
    loss_head: TargetHead  # what the cross-entropy goes through: the same, or its frequent rows
    head: torch.nn.Module  # as accelerate wrapped it
    optimizer: torch.optim.Optimizer
    heldout: list[HeldoutBatch]  # this process's share


def refuse_another_target(target: TargetConfig, cache: FeatureCache) -> None:
    """Raise ValueError, naming the fields, unless `target` made the features."""
    differences = fingerprint_differences(fingerprint(target), cache.fingerprint)
    if differences:
        raise ValueError(
            f"The features in {cache.path} are not those of the target {target.path}:\n  "
            + "\n  ".join(differences)
            + "\n(here: the target, there: the cache). Give the target that was dumped "
            "(target=...), or dump this one with `python -m scripts.dump_features`."
        )


def new_head(config: TrainConfig, target: TargetConfig) -> DraftHead:
    """A head with random weights: the same ones in every process."""
    torch.manual_seed(config.seed)
    shape = draft_config(
        load_config(target),
        intermediate_size=config.head.intermediate_size,
        inputs=config.head.inputs,
    )
    return DraftHead(shape)


def prepare(
    accelerator: Accelerator,
    config: TrainConfig,
    cache: FeatureCache,
    target_head: TargetHead,
    head: DraftHead,
    *,
    training: list[int],
    heldout: list[int],
    checkpoint: Path | None,
) -> Run:
    """Start values, optimizer and wrapping of `head`, or what `checkpoint` holds of them."""
    if checkpoint:
        load_weights(checkpoint, head)
    else:
        initialise(head, config, target_head, cache, training)
    loss_head = target_head
    if config.loss.vocab:
        loss_head = frequent_head(target_head, cache, training, count=config.loss.vocab)
    optimizer = torch.optim.AdamW(
        head.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
    )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        settings = accelerator.state.deepspeed_plugin.deepspeed_config
        settings["gradient_clipping"] = config.max_grad_norm  # the engine clips by itself
        settings["train_micro_batch_size_per_gpu"] = 1  # unused: we cut batches by tokens
    wrapped, optimizer = accelerator.prepare(head, optimizer)
    if checkpoint:
        restore(checkpoint, accelerator=accelerator, head=wrapped, optimizer=optimizer)
    return Run(
        accelerator=accelerator,
        config=config,
        cache=cache,
        target_head=target_head,
        loss_head=loss_head,
        head=wrapped,
        optimizer=optimizer,
        heldout=heldout_batches(accelerator, cache, target_head, heldout),
    )


def heldout_batches(
    accelerator: Accelerator, cache: FeatureCache, target_head: TargetHead, heldout: list[int]
) -> list[HeldoutBatch]:
    """This process's share of the held-out sequences.

    They are cut before they are shared out: what a batch computes then depends on no process.
    """
    return heldout_in(
        cache,
        target_head,
        heldout,
        device=accelerator.device,
        process=slice(accelerator.process_index, None, accelerator.num_processes),
    )


def heldout_in(
    cache: FeatureCache,
    target_head: TargetHead,
    heldout: list[int],
    *,
    device: torch.device,
    process: slice = slice(None),
) -> list[HeldoutBatch]:
    """Held-out sequences in batches, or those batches of them that are this process's."""
    cut = split_step(heldout, cache.lengths, world_size=1, micro_batch_tokens=HELDOUT_TOKENS)[0]
    packed = [pack(cache, sequences).to(device) for sequences in cut[process] if sequences]
    return [
        prepare_batch(batch, [cache.ids[i] for i in batch.sequences], target_head)
        for batch in packed
    ]
