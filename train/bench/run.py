"""Our training step beside the papers', and beside the matrix products that no step can avoid."""

import logging
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from data.batches import add_noise, pack, prefetch
from data.cache.reader import FeatureCache
from data.config import or_known
from data.memory import peak_resident
from data.targets.model import read_target_head
from train.bench.estimate import EstimateTimes, time_estimate
from train.bench.plain import plain_loss
from train.bench.products import attention, head_products, output_head_products
from train.config import TrainConfig
from train.fit.launch import start_accelerator
from train.fit.plan import Step, split_cache
from train.fit.setup import Run, new_head, prepare
from train.fit.step import batch_loss, train_step

log = logging.getLogger(__name__)
CONVERSATIONS = 4  # a batch, as in the papers' code
BATCHES = 8  # when max_steps is null


@dataclass
class Seconds:
    """What each batch took; one entry a batch."""

    ours: list[float] = field(default_factory=list)  # alternating with the plain one
    plain: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)  # ours after ours, as in training
    products: list[float] = field(default_factory=list)  # the matrix products of ours alone
    parts: dict[str, list[float]] = field(default_factory=dict)  # of ours, by part


def bench(config: TrainConfig) -> dict[str, Any]:
    """Alternate batch by batch, so that a noisy machine is noisy to all. Returns the figures."""
    run, batches = _prepared(config)
    seconds, supervised = Seconds(), []
    for name in ("ours", "plain"):  # warm-up
        _timed(partial(STEPS[name], run, batches[0]))
    for number, sequences in enumerate(batches):
        supervised.append(int(run.cache.num_supervised[sequences].sum()))
        order = ["ours", "plain"] if number % 2 else ["plain", "ours"]
        for name in order:
            getattr(seconds, name).append(_timed(partial(STEPS[name], run, sequences)))
        _time_parts(run, sequences, seconds)
        log.info(
            "batch %d of %d: %s supervised tokens, ours %.0f, plain %.0f tokens/s, ratio %.2f",
            number + 1,
            len(batches),
            f"{supervised[-1]:,}",
            supervised[-1] / seconds.ours[-1],
            supervised[-1] / seconds.plain[-1],
            seconds.plain[-1] / seconds.ours[-1],
        )
    data_wait = _data_wait(run, batches)
    longest = max(batches, key=lambda sequences: int(run.cache.lengths[sequences].max()))
    memory = {name: _peak_memory(name, config, longest) for name in ("ours", "plain")}
    estimate = time_estimate(run) if run.heldout else None
    for line in [*_table(seconds, memory), *([_estimate_line(estimate)] if estimate else [])]:
        log.info("%s", line)
    return {
        "vs_plain": _median_ratio(seconds.plain, seconds.ours),
        "of_matmul_limit": _median_ratio(seconds.products, seconds.again),
        "memory_vs_plain": round(memory["ours"] / memory["plain"], 4),
        "data_wait": round(data_wait, 5),
        "estimate_vs_one_by_one": round(estimate.ratio, 1) if estimate else None,
        "ours_supervised_tokens_per_second": round(sum(supervised) / sum(seconds.ours), 1),
        "plain_supervised_tokens_per_second": round(sum(supervised) / sum(seconds.plain), 1),
        "ours_peak_bytes": memory["ours"],
        "plain_peak_bytes": memory["plain"],
        "batches": len(batches),
        "longest_sequence": int(run.cache.lengths.max()),
        "device": str(run.accelerator.device),
    }


def our_step(run: Run, sequences: list[int]) -> None:
    """One update as training does it."""
    count = int(run.cache.num_supervised[sequences].sum())
    train_step(run, Step(1, 0, sequences, count), [pack(run.cache, sequences)])


def plain_step(run: Run, sequences: list[int]) -> None:
    """One update as the papers' code does it."""
    config, head = run.config, run.accelerator.unwrap_model(run.head)
    batch = pack(run.cache, sequences).to(run.accelerator.device)
    noisy = add_noise(batch, kind=config.noise, width=config.noise_width, seed=0, epoch=0)
    loss = plain_loss(
        head,
        run.target_head,
        batch,
        noisy,
        l1_weight=config.loss.l1_weight,
        ce_weight=config.loss.ce_weight,
    )
    (loss / len(batch.supervised)).backward()
    nn.utils.clip_grad_norm_(head.parameters(), config.max_grad_norm)
    run.optimizer.step()
    run.optimizer.zero_grad()


STEPS: dict[str, Callable[[Run, list[int]], None]] = {"ours": our_step, "plain": plain_step}


def _prepared(config: TrainConfig) -> tuple[Run, list[list[int]]]:
    """A run before its first step, and batches of conversations in random order."""
    accelerator = start_accelerator(config)
    cache = FeatureCache(Path(config.features))
    target = or_known(config.target, cache.fingerprint)
    target_head = read_target_head(target).to(accelerator.device)
    head = new_head(config, target).to(accelerator.device)
    training, heldout = split_cache(cache, config)
    run = prepare(
        accelerator,
        config,
        cache,
        target_head,
        head,
        training=training,
        heldout=heldout,
        checkpoint=None,
    )
    generator = torch.Generator().manual_seed(config.seed)
    order = [training[i] for i in torch.randperm(len(training), generator=generator).tolist()]
    batches = [order[i : i + CONVERSATIONS] for i in range(0, len(order), CONVERSATIONS)]
    whole = [batch for batch in batches if len(batch) == CONVERSATIONS]
    return run, (whole or batches)[: config.max_steps or BATCHES]


def _time_parts(run: Run, sequences: list[int], seconds: Seconds) -> None:
    """Where the time of our step goes, and what its matrix products take alone."""

    def note(name: str, function: Callable[[], Any]) -> Any:
        result: list[Any] = []
        taken = _timed(lambda: result.append(function()))
        seconds.parts.setdefault(name, []).append(taken)
        return result[0]

    config, device = run.config, run.accelerator.device
    our_step(run, sequences)  # the plain step has left its traces in memory
    seconds.again.append(_timed(partial(our_step, run, sequences)))
    batch = note("data", lambda: pack(run.cache, sequences).to(device))
    note("attention", attention(run, batch))
    note(
        "noise",
        lambda: add_noise(batch, kind=config.noise, width=config.noise_width, seed=0, epoch=0),
    )
    embeddings = run.loss_head.embed(batch.next_ids).float()
    note("head forward", lambda: run.head(embeddings, batch.features.float(), batch.lengths))
    losses = note("loss", lambda: batch_loss(run, batch, 0))
    note("head backward", lambda: losses.loss.backward())
    note("optimizer", lambda: (run.optimizer.step(), run.optimizer.zero_grad()))
    seconds.products.append(_timed(head_products(run, batch)))
    output_head = _timed(output_head_products(run, batch))
    seconds.products[-1] += output_head
    seconds.parts.setdefault("output head's products", []).append(output_head)


def _data_wait(run: Run, batches: list[list[int]]) -> float:
    """Share of the time that training steps in a row wait for their batches."""
    loaded = prefetch(batches, lambda sequences: pack(run.cache, sequences))
    waited, began = 0.0, time.perf_counter()
    for sequences in batches:
        asked = time.perf_counter()
        batch = next(loaded)
        waited += time.perf_counter() - asked
        train_step(run, Step(1, 0, sequences, len(batch.supervised)), [batch])
    _wait_for_device()
    return waited / (time.perf_counter() - began)


def _peak_memory(name: str, config: TrainConfig, sequences: list[int]) -> int:
    """Bytes that one step adds to what the process holds, measured in a process of its own."""
    if torch.cuda.is_available():
        run, _ = _prepared(config)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        STEPS[name](run, sequences)
        return torch.cuda.max_memory_allocated() - held
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report_peak, args=(name, config, sequences, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(
            f"The {name} step of {len(sequences)} conversations died with exit code "
            f"{process.exitcode} while its memory was measured: out of memory, most likely. Use "
            "a cache with a smaller max_length."
        ) from None
    finally:
        process.join()


def _report_peak(name: str, config: TrainConfig, sequences: list[int], sender: Any) -> None:
    run, _ = _prepared(config)
    held = psutil.Process().memory_info().rss
    STEPS[name](run, sequences)
    sender.send(peak_resident() - held)


def _timed(function: Callable[[], Any]) -> float:
    _wait_for_device()
    started = time.perf_counter()
    function()
    _wait_for_device()
    return time.perf_counter() - started


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _median_ratio(upper: list[float], lower: list[float]) -> float:
    return round(statistics.median(u / v for u, v in zip(upper, lower, strict=True)), 4)


def _table(seconds: Seconds, memory: dict[str, int]) -> list[str]:
    """The breakdown for the terminal; what has no part of its own is the rest."""
    total, products = sum(seconds.again), sum(seconds.products)
    parts = {name: sum(taken) for name, taken in seconds.parts.items()}
    vocabulary = parts.pop("output head's products")
    passes = parts.pop("loss") - parts["head forward"] - parts["noise"] - vocabulary
    attention, both = parts.pop("attention"), parts.pop("head forward") + parts.pop("head backward")
    shown = {
        "output head, its products": vocabulary,
        "output head, loss": passes,
        "head": both - attention,
        "attention": attention,
        **parts,
    }
    shown["rest"] = total - sum(shown.values())
    lines = [f"{'one step of ours, by part':<30} {'seconds':>8} {'share':>7}"]
    for name, taken in shown.items():
        lines.append(f"  {name:<28} {taken:8.2f} {taken / total:7.1%}")
    lines.append(f"{'all':<30} {total:8.2f}")
    lines.append(f"{'its matrix products alone':<30} {products:8.2f} {products / total:7.1%}")
    peaks = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in memory.items())
    return [*lines, f"peak memory of one step: {peaks}"]


def _estimate_line(times: EstimateTimes) -> str:
    return (
        f"held-out estimate: {times.ours:,.0f} positions/s, {times.one_by_one:,.1f} one by one "
        f"({times.places} positions, the same figures): {times.ratio:,.0f}x"
    )
