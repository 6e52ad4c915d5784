"""The training loop: a feature cache in, checkpoints of a draft head out."""

import logging
import math
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from data.batches import PackedBatch, pack, prefetch, split_step
from data.cache.reader import FeatureCache
from data.config import or_known
from data.lock import locked
from data.processes import stoppable
from data.targets.model import read_target_head
from train.acceptance import HeldoutEstimate, chain_acceptance
from train.config import TrainConfig
from train.fit.checkpoints import (
    Best,
    check_space,
    find_resumable,
    make_record,
    save_checkpoint,
    tidy,
)
from train.fit.describe import describe_run, note_result, note_start
from train.fit.launch import start_accelerator, telling_lost_processes
from train.fit.metrics import Metrics, refuse_missing_tracker
from train.fit.plan import Step, learning_rate, plan_steps, split_cache
from train.fit.setup import Run, new_head, prepare, refuse_another_target
from train.fit.sharding import whole_head
from train.fit.step import train_step

log = logging.getLogger(__name__)
ESTIMATES_A_RUN = 10  # held-out estimates and checkpoints when save_every is null


def fit(config: TrainConfig) -> float:
    """Train a head and return the best held-out acceptance length. Collective.

    Raises ValueError for settings, cache or checkpoint that do not fit together,
    FileNotFoundError for a missing cache, RuntimeError for a loss that is not finite, a full disk
    and a second training in the same folder.
    """
    refuse_missing_tracker(config.tracker)
    hint = f"The same command goes on from the newest checkpoint in {config.out}."
    with stoppable(f"Stopped. {hint}"):
        accelerator = start_accelerator(config)
        try:
            with telling_lost_processes(accelerator, hint=hint):
                return _fit(config, accelerator)
        finally:
            for tracker in accelerator.trackers:
                tracker.finish()
            # The process group stays, for the next job of a --multirun.
            accelerator.free_memory()


def _fit(config: TrainConfig, accelerator: Accelerator) -> float:
    out = Path(config.out)
    cache = FeatureCache(Path(config.features))
    training, heldout = split_cache(cache, config)
    steps = plan_steps(cache, training, config)

    target = or_known(config.target, cache.fingerprint)
    refuse_another_target(target, cache)
    target_head = read_target_head(target).to(accelerator.device)
    head = new_head(config, target).to(accelerator.device)

    busy = f"Another training is writing into {out}. Wait for it, or give another out=FOLDER."
    is_main = accelerator.is_main_process
    with locked(out / ".lock", busy=busy) if is_main else nullcontext():
        checkpoint = find_resumable(out, config, cache)
        start, best = int(checkpoint.name) if checkpoint else 0, Best.of(checkpoint)
        if is_over(start, best, config, total=len(steps)):
            log.info("%s is finished after %d steps: nothing to do.", out, start)
            if is_main:
                note_result(out, step=start, total=len(steps))
            return best.length
        record = None
        if is_main:
            describe_run(config, cache, head, training, heldout, len(steps), start, accelerator)
            check_space(out, head, keep=config.keep)
            record = note_start(config, cache, accelerator, start=start, total=len(steps))
            tidy(out, best)
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
        last = run_steps(run, steps[start:], best, run_id=record["id"] if record else "")
        if is_main:
            note_result(out, step=last, total=len(steps))
    return best.length


def is_over(step: int, best: Best, config: TrainConfig, *, total: int) -> bool:
    """Whether the run ends with this step. The same on all processes."""
    return step == total or (config.patience is not None and best.since >= config.patience)


def run_steps(run: Run, steps: list[Step], best: Best, *, run_id: str) -> int:
    """Train through `steps`, with an estimate and a checkpoint every now and then.

    best:   the best estimate before them; kept up to date
    run_id: what a tracker knows the run by
    returns the last step's number
    """
    config, total = run.config, steps[-1].number
    save_every = config.save_every or max(1, math.ceil(total / ESTIMATES_A_RUN))
    metrics = Metrics(
        run.accelerator, config, run_id=run_id, start=steps[0].number - 1, total=total
    )
    bar = tqdm(
        total=total,
        initial=steps[0].number - 1,
        unit="step",
        disable=None if run.accelerator.is_main_process else True,  # None: only on a terminal
    )
    loaded = prefetch(steps, partial(load, run))
    with logging_redirect_tqdm(), bar:
        for step in steps:
            began = time.perf_counter()
            micro_batches = next(loaded)
            waited = time.perf_counter() - began
            lr = learning_rate(step.number, total, config)
            for group in run.optimizer.param_groups:
                group["lr"] = lr
            sums, grad_norm = train_step(run, step, micro_batches)
            metrics.add(step, sums, grad_norm=grad_norm, lr=lr, began=began, waited=waited)
            bar.update()
            if step.number % save_every == 0 or step.number == total:
                estimate_and_save(run, step.number, best, metrics)
            ends = is_over(step.number, best, config, total=total)
            if step.number % config.log_every == 0 or ends:
                bar.set_postfix_str(metrics.log_line(), refresh=False)
            if ends:
                break
    if step.number < total:
        log.info(
            "stopping early after step %d of %d: %d estimates in a row (patience) did not beat the "
            "%.3f of step %d. The learning rate has not decayed: %.1e of %.1e at its peak.",
            *(step.number, total, best.since, best.length),
            *(best.record["step"] if best.record else 0, lr, config.lr),
        )
    return step.number


def load(run: Run, step: Step) -> list[PackedBatch]:
    """This process's share of a step, cut into forwards."""
    shares = split_step(
        step.sequences,
        run.cache.lengths,
        world_size=run.accelerator.num_processes,
        micro_batch_tokens=run.config.micro_batch_tokens,
    )
    pin = run.accelerator.device.type == "cuda"
    own = shares[run.accelerator.process_index]
    return [pack(run.cache, sequences, pin=pin) for sequences in own]


def estimate_and_save(run: Run, step: int, best: Best, metrics: Metrics) -> None:
    """Measure acceptance, unless nothing is held out, and write a checkpoint. Collective."""
    measured = None  # not a τ of 1 that nobody measured
    if run.config.heldout.share > 0:
        measured = estimate(run)
        best.add(step, measured)
        metrics.add_acceptance(step, measured, best=best.length)
    save_checkpoint(
        Path(run.config.out),
        make_record(step, run.config, run.cache, estimate=measured, best=best),
        accelerator=run.accelerator,
        head=run.head,
        optimizer=run.optimizer,
        keep=run.config.keep,
    )


def estimate(run: Run) -> HeldoutEstimate:
    """Acceptance on the held-out documents of all processes, known to every one of them."""
    head = whole_head(run.accelerator, run.head)
    own = chain_acceptance(
        head, run.target_head, run.heldout, num_steps=run.config.heldout.num_steps
    )
    return HeldoutEstimate.joined(gather_object([own]))
