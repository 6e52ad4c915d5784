"""The dump's speed as ratios, each taken within one run: rates of a noisy machine say little."""

import logging
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import torch

from data.cache.calibration import ensure_calibration
from data.cache.manifest import make_manifest
from data.cache.reader import FeatureCache
from data.cache.shards import batches_of, padded
from data.chats.tokens import Tokens
from data.config import DumpConfig
from data.dump.bench_processes import two_against_one, why_not
from data.dump.plain import plain_dump, read_plain
from data.dump.plan import Plan, auto_feature_dtype
from data.dump.run import do_shards, prepare_dump
from data.files import write_json, writing
from data.targets.model import Target, load_target

log = logging.getLogger(__name__)

PROCESS_SHARDS = 6  # done by one process and by two
WARM_READS, COLD_READS = 20, 6  # times that each sequence is read, by each of the two


def bench(config: DumpConfig) -> dict[str, Any]:
    """Dump, plain dump, bare forward and both ways of reading on the same conversations.

    All is written into a folder below `config.out`, and deleted.

    Raises ValueError for a target that has no Transformers model to compare with.
    """
    if config.target.engine != "transformers":
        raise ValueError(
            f"target.engine={config.target.engine} has no forward to compare with. Leave it out."
        )
    began = time.perf_counter()
    with _folder(Path(config.out).expanduser()) as folder:
        out, plain = folder / "cache", folder / "plain"
        out.mkdir()
        plain.mkdir()
        plan, rates, device = _dump_both_ways(config, out, plain)
        warm, cold = time_reading(out, plain)
        reason = why_not(device)
        shards = range(min(PROCESS_SHARDS, len(plan.shards)))
        two = two_against_one(out, config.target, shards) if reason is None else None
    return {
        "vs_forward": _median_ratio(rates["dump"], rates["forward"]),
        "vs_plain": _median_ratio(rates["dump"], rates["plain"]),
        "two_processes": two and round(two, 4),
        "two_processes_reason": reason,
        "read_vs_pickle": round(warm, 4),
        "read_vs_pickle_cold": cold and round(cold, 4),
        **{f"{name}_tokens_per_second": round(statistics.median(rates[name]), 1) for name in rates},
        "num_tokens": plan.num_tokens,
        "num_sequences": len(plan.sequence_ids),
        "num_shards": len(plan.shards),
        "device": str(device),
        "seconds": round(time.perf_counter() - began, 1),
    }


def _dump_both_ways(
    config: DumpConfig, out: Path, plain: Path
) -> tuple[Plan, dict[str, list[float]], torch.device]:
    """A finished cache and as many pickles, and the rates at which they were made."""
    plan, tokens = prepare_dump(config, out)
    target = load_target(config.target)
    if plan.feature_dtype == "int8":
        ensure_calibration(out, plan, tokens, lambda: target)
    rates = time_dumps(target, plan, tokens, out, plain)
    write_json(out / "manifest.json", make_manifest(out, plan))
    return plan, rates, target.device


def time_dumps(
    target: Target, plan: Plan, tokens: Tokens, out: Path, plain: Path
) -> dict[str, list[float]]:
    """Tokens a second of the bare forward, our dump and the plain one, for each shard.

    Shard by shard, each in another order, so that a noisy machine is noisy to all.
    """
    dtype = getattr(torch, auto_feature_dtype(target.dtype))

    def forward(index: int) -> None:
        for batch in batches_of(plan, tokens, index):
            input_ids, _ = padded(tokens, batch)
            features = target.features(input_ids.to(target.device), tokens.lengths[batch])
        features[..., :1].cpu()  # waits for the device

    def dump(index: int) -> None:
        do_shards(target, out, plan, tokens, [index], advance=lambda _: None)

    def plain_(index: int, folder: Path = plain) -> None:
        plain_dump(target, tokens, range(*plan.shards[index]), folder, dtype=dtype)

    ways: dict[str, Callable[[int], None]] = {"forward": forward, "dump": dump, "plain": plain_}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    orders = list(permutations(ways))
    forward(0)  # warm-up
    with tempfile.TemporaryDirectory(dir=plain.parent) as elsewhere:
        plain_(0, Path(elsewhere))
    for index, (first, last) in enumerate(plan.shards):
        num_tokens = int(tokens.offsets[last] - tokens.offsets[first])
        for name in orders[index % len(orders)]:
            rates[name].append(num_tokens / _seconds(ways[name], index))
        log.info(
            "shard %d of %d: %s tokens; tokens/s: forward %.0f, dump %.0f, plain dump %.0f",
            index + 1,
            len(plan.shards),
            f"{num_tokens:,}",
            *(rates[name][-1] for name in ways),
        )
    return rates


def time_reading(out: Path, plain: Path) -> tuple[float, float | None]:
    """How many times as fast random sequences are read from our cache as from pickles.

    Each sequence's features are summed. First with all files in the page cache; then, where the
    system can drop them from it, without, and opening our cache counts too. (Null where it cannot.)
    """
    everything = range(len(FeatureCache(out)))
    warm = _warm_ratio(out, plain, everything)
    log.info("reading: %.2f times as fast as pickles, with all files in memory", warm)
    if not hasattr(os, "posix_fadvise"):
        return warm, None
    cold = _reading_ratio(
        partial(read_pickles, plain),
        lambda order: read_cache(FeatureCache(out), order),
        everything,
        COLD_READS,
        # What is mapped would stay in the page cache: no cache is open here.
        before=lambda: _drop_from_page_cache([*out.rglob("*.safetensors"), *plain.iterdir()]),
    )
    log.info("reading: %.2f times as fast as pickles, from the disk", cold)
    return warm, cold


def read_pickles(plain: Path, order: Sequence[int]) -> None:
    for index in order:
        read_plain(plain, index)["hidden_state"].sum().item()


def read_cache(cache: FeatureCache, order: Sequence[int]) -> None:
    for index in order:
        cache.sequence(index).features.sum().item()


def _warm_ratio(out: Path, plain: Path, everything: Sequence[int]) -> float:
    pickles, cache = partial(read_pickles, plain), partial(read_cache, FeatureCache(out))
    for way in (pickles, cache):  # into the page cache
        way(everything)
    return _reading_ratio(pickles, cache, everything, WARM_READS)


def _reading_ratio(
    pickles: Callable[[Sequence[int]], None],
    cache: Callable[[Sequence[int]], None],
    everything: Sequence[int],
    reads: int,
    *,
    before: Callable[[], None] = lambda: None,
) -> float:
    """The median of `reads` times that all is read by both, in turn, in a random order."""
    draw, ratios = random.Random(0), []
    for number in range(reads):
        order = draw.sample(everything, len(everything))
        seconds = {}
        for way in (pickles, cache) if number % 2 else (cache, pickles):
            before()
            seconds[way] = _seconds(way, order)
        ratios.append(seconds[pickles] / seconds[cache])
    return statistics.median(ratios)


def _drop_from_page_cache(files: Iterable[Path]) -> None:
    for file in files:
        with file.open("rb") as f:
            os.fsync(f.fileno())  # only what is on the disk can be dropped
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _seconds(function: Callable[..., None], *arguments: Any) -> float:
    began = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - began


def _median_ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    return round(statistics.median(o / p for o, p in zip(ours, others, strict=True)), 4)


@contextmanager
def _folder(out: Path) -> Iterator[Path]:
    """A folder on the disk of `out`, deleted at the end, as is `out` if it is new."""
    is_new = not out.exists()
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=out, prefix="bench-") as folder:
            yield Path(folder)
    finally:
        if is_new:
            out.rmdir()


def table(result: dict[str, Any]) -> str:
    """The figures of `bench` for people, each with what it should reach."""
    reason = result["two_processes_reason"]
    rows = [
        ("dump / bare forward", result["vs_forward"], "0.95", ""),
        ("dump / plain dump", result["vs_plain"], "1.3", "(data/dump/plain.py)"),
        ("two processes / one", result["two_processes"], "1.6", f"({reason or 'one core each'})"),
        ("reading / pickles, from memory", result["read_vs_pickle"], "3", ""),
        ("reading / pickles, from disk", result["read_vs_pickle_cold"], "", ""),
    ]
    lines = [f"{'speed of':<32}{'ratio':>7}{'goal':>7}"]
    for name, ratio, goal, note in rows:
        shown = "-" if ratio is None else f"{ratio:.2f}"
        lines.append(f"{name:<32}{shown:>7}{goal:>7}  {note}".rstrip())
    return "\n".join(lines)
