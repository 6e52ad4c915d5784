"""Two processes of one core each against one: how much faster a plan is done."""

import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch

from data.cache.shards import batches_of, padded
from data.config import TargetConfig
from data.dump.plan import read_plan, read_tokens
from data.dump.run import do_shards
from data.targets.model import load_target

log = logging.getLogger(__name__)

ROUNDS = ("one", "two", "two", "one")  # the order in which they go; each twice
PATIENCE = 600  # seconds that a round may take


def why_not(device: torch.device) -> str | None:
    """Why two processes cannot be measured here; None if they can."""
    if device.type != "cpu":
        return f"measured on CPU cores only, the target is on {device}"
    if len(_cores()) < 2:
        return "one core only"
    return None


def two_against_one(out: Path, target: TargetConfig, shards: Sequence[int]) -> float:
    """Time of one process over time of two, for the same `shards` of the plan in `out`.

    Each process has one thread on a core of its own. Both load the target and run a batch before
    the first round; a round ends when the last of them has written its shards.

    Raises RuntimeError if one of them fails.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    workers = [
        context.Process(
            target=_work, args=(barrier, rank, core, out, target, list(shards)), daemon=True
        )
        for rank, core in enumerate(_cores()[:2])
    ]
    for worker in workers:
        worker.start()
    seconds: dict[str, list[float]] = {"one": [], "two": []}
    try:
        for name in ROUNDS:
            barrier.wait(PATIENCE)
            began = time.perf_counter()
            barrier.wait(PATIENCE)
            seconds[name].append(time.perf_counter() - began)
            log.info("%s process%s: %.1f s", name, "" if name == "one" else "es", seconds[name][-1])
        for worker in workers:
            worker.join()
    except threading.BrokenBarrierError as error:
        raise RuntimeError("A process of the benchmark has failed; see its message.") from error
    finally:
        for worker in workers:
            worker.terminate()  # does nothing to one that has ended
    return sum(seconds["one"]) / sum(seconds["two"])


def _work(
    barrier: Barrier, rank: int, core: int, out: Path, target: TargetConfig, shards: list[int]
) -> None:
    """One process: alone it does all shards, with the other one its stride of them."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    is_done = False
    try:
        plan = read_plan(out)
        tokens = read_tokens(out, plan)
        loaded = load_target(target)
        for batch in batches_of(plan, tokens, shards[0]):  # warm-up
            loaded.features(padded(tokens, batch)[0], tokens.lengths[batch])
        for name in ROUNDS:
            mine = shards[rank::2] if name == "two" else shards if rank == 0 else []
            barrier.wait(PATIENCE)
            do_shards(loaded, out, plan, tokens, mine, advance=lambda _: None)
            barrier.wait(PATIENCE)
        is_done = True
    finally:
        if not is_done:
            barrier.abort()  # nobody waits for this one any more


def _cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
