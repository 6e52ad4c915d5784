"""The training loop: a feature cache in, checkpoints of a draft head out."""

import logging
import math
import time
from pathlib import Path

from accelerate.utils import gather_object
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from data.batches import PackedBatch, pack, prefetch, split_step
from data.cache import FeatureCache
from data.config import or_known
from data.target import read_target_head
from train.acceptance import HeldoutEstimate, chain_acceptance
from train.checkpoints import (
    best_record,
    find_resumable,
    make_record,
    note_best,
    save_checkpoint,
)
from train.config import TrainConfig
from train.launch import start_accelerator
from train.metrics import Metrics, describe_run, refuse_missing_tracker
from train.plan import Step, learning_rate, plan_steps, split_cache
from train.setup import Run, new_head, prepare, refuse_another_target
from train.sharding import whole_head
from train.step import train_step

log = logging.getLogger(__name__)
ESTIMATES_A_RUN = 10  # held-out estimates and checkpoints when save_every is null


def fit(config: TrainConfig) -> float:
    """Train a head and return the best held-out acceptance length. Collective.

    Raises ValueError for settings, cache or checkpoint that do not fit together,
    FileNotFoundError for a missing cache, RuntimeError for a loss that is not finite.
    """
    refuse_missing_tracker(config.tracker)
    accelerator = start_accelerator(config)
    out = Path(config.out)
    cache = FeatureCache(Path(config.features))
    training, heldout = split_cache(cache, config)
    steps = plan_steps(cache, training, config)

    target = or_known(config.target, cache.fingerprint)
    refuse_another_target(target, cache)
    target_head = read_target_head(target).to(accelerator.device)
    head = new_head(config, target).to(accelerator.device)

    checkpoint = find_resumable(out, config, cache)
    start = int(checkpoint.name) if checkpoint else 0
    if accelerator.is_main_process:
        describe_run(config, cache, head, training, heldout, len(steps), start, accelerator)
    if start < len(steps):
        run = prepare(
            accelerator,
            config,
            cache,
            target_head,
            head,
            training=training,
            heldout=heldout,
            checkpoint=checkpoint,
        )
        run_steps(run, steps[start:])
    else:
        log.info("%s is finished after %d steps: nothing to do.", out, start)
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.free_memory()  # but the process group stays, for the next job of a --multirun
    best = best_record(out)
    return best["acceptance_length"] if best else 1.0


def run_steps(run: Run, steps: list[Step]) -> None:
    """Train through `steps`, with an estimate and a checkpoint every now and then."""
    accelerator, config, cache = run.accelerator, run.config, run.cache
    out = Path(config.out)
    total = steps[-1].number
    save_every = config.save_every or max(1, math.ceil(total / ESTIMATES_A_RUN))
    metrics = Metrics(out, accelerator, config, start=steps[0].number - 1, total=total)

    def load(step: Step) -> tuple[Step, list[PackedBatch]]:
        micro_batches = split_step(
            step.sequences,
            cache.lengths,
            world_size=accelerator.num_processes,
            micro_batch_tokens=config.micro_batch_tokens,
        )[accelerator.process_index]
        pin = accelerator.device.type == "cuda"
        return step, [pack(cache, sequences, pin=pin) for sequences in micro_batches]

    loaded = prefetch(steps, load)
    bar = tqdm(
        total=total,
        initial=steps[0].number - 1,
        unit="step",
        disable=None if accelerator.is_main_process else True,  # None: only on a terminal
    )
    with logging_redirect_tqdm(), bar:
        for _ in steps:
            began = time.perf_counter()
            step, micro_batches = next(loaded)
            waited = time.perf_counter() - began
            lr = learning_rate(step.number, total, config)
            for group in run.optimizer.param_groups:
                group["lr"] = lr
            sums, grad_norm = train_step(run, step, micro_batches)
            metrics.add(step, sums, grad_norm=grad_norm, lr=lr, began=began, waited=waited)
            bar.update()
            is_last = step.number == total
            if step.number % save_every == 0 or is_last:
                counts = None  # with heldout.share=0 nothing is known of acceptance
                if config.heldout.share > 0:
                    counts = estimate(run)
                    metrics.add_acceptance(step.number, counts)
                record = make_record(step.number, config, cache, counts)
                if accelerator.is_main_process and counts:
                    note_best(out, step.number, counts)
                save_checkpoint(
                    out,
                    record,
                    accelerator=accelerator,
                    head=run.head,
                    optimizer=run.optimizer,
                    keep=config.keep,
                )
            if step.number % config.log_every == 0 or is_last:
                bar.set_postfix_str(metrics.log_line(), refresh=False)


def estimate(run: Run) -> HeldoutEstimate:
    """Acceptance on the held-out documents of all processes, known to every one of them."""
    head = whole_head(run.accelerator, run.head)
    own = chain_acceptance(
        head, run.target_head, run.documents, num_steps=run.config.heldout.num_steps
    )
    return HeldoutEstimate.joined(gather_object([own]))
