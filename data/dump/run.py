"""Run the frozen target over the chats once, and keep its features.

Plan, check, run the shards, write the manifest. A dump that is killed goes on where it stopped, and
ends byte-identical to one that was not, whatever the number of processes.
"""

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

from tqdm import tqdm

from data.cache.calibration import ensure_calibration
from data.cache.manifest import bytes_there, manifest_is, shard_records, unfinished, write_manifest
from data.cache.reader import calibration_record, read_calibration, shard_record
from data.cache.shards import batches_of, padded, shard_features, write
from data.chats.tokens import Tokens
from data.config import DumpConfig
from data.dump.plan import (
    Plan,
    check_folder,
    check_same,
    check_space,
    make_plan,
    read_plan,
    read_tokens,
    remove_leftovers,
    settings_differences,
    settings_of,
    write_plan,
)
from data.dump.progress import log_time, measured_rate, progress
from data.files import writing
from data.lock import locked
from data.processes import barrier, process_state, stoppable
from data.replies.origin import log_replies
from data.targets.model import (
    Target,
    check_launch,
    check_output_head,
    fingerprint,
    fingerprint_differences,
    load_config,
    load_target,
    load_tokenizer,
    target_device,
    target_dtype,
)
from data.targets.vllm_features import load_vllm_target

log = logging.getLogger(__name__)

# The first process may read chats for hours, and the slowest may end hours after the others. One
# that has died is noticed at once.
TIMEOUT = timedelta(days=2)
BATCH_TOKENS = {"cpu": 2048, "accelerator": 16384}


def dump(config: DumpConfig) -> Path:
    """Dump the features of `config.dataset` under `config.target`. Returns the cache's folder.

    Raises ValueError for what the user can mend (settings, folder, data, space, features that are
    not finite), and RuntimeError if another dump holds the folder or the outside world fails.
    """
    with stoppable("stopped: the same command goes on from here"):
        return _dump(config, Path(config.out).expanduser())


def _dump(config: DumpConfig, out: Path) -> Path:
    state = process_state(timeout=TIMEOUT)
    check_launch(config.target, state.num_processes)
    wait_for_everyone = barrier(state, timeout=TIMEOUT)
    if state.is_main_process:
        check_folder(out)
    if config.dry_run:
        if state.is_main_process:
            plan, tokens = prepare_dump(config, out)
            if todo := unfinished(out, plan):
                _start(config, out, plan, tokens, todo, world=state.num_processes)
        return out
    with lock_cache(out) if state.is_main_process else contextlib.nullcontext():
        if state.is_main_process:
            remove_leftovers(out)
            prepare_dump(config, out)
        wait_for_everyone()
        if (out / "manifest.json").is_file():
            return out
        plan = read_plan(out)
        rank, world = state.process_index, state.num_processes
        run_shards(config, out, plan, rank=rank, world=world, wait_for_everyone=wait_for_everyone)
        if world > 1:
            log.info("the first of %d processes has done its part; it waits for the others", world)
        wait_for_everyone()
        if state.is_main_process:
            write_manifest(out, plan)
        wait_for_everyone()
    return out


def prepare_dump(config: DumpConfig, out: Path) -> tuple[Plan, Tokens]:
    """Make and write the plan, or take the folder's own if it is of the same settings."""
    with writing(out, also_reads=True):
        plan, tokens, is_new = _plan_of(config, out)
    log.info(
        "plan: %s sequences, %s tokens, %s pairs supervised (%.1f %%), %d shards",
        f"{len(plan.sequence_ids):,}",
        f"{plan.num_tokens:,}",
        f"{plan.num_supervised:,}",
        100 * plan.num_supervised / plan.num_tokens,
        len(plan.shards),
    )
    log_replies(plan.replies, plan.fingerprint)
    records = shard_records(out, plan)
    if None not in records and manifest_is(out, plan):
        log.info("%s is finished: nothing to do.", out)
        return plan, tokens
    if (out / "manifest.json").is_file() and not config.dry_run:
        broken = [f"shard {index}" for index, record in enumerate(records) if record is None]
        if plan.feature_dtype == "int8" and calibration_record(out) is None:
            broken.append("the calibration")
        log.warning("damaged in %s, done again: %s", out, ", ".join(broken) or "manifest.json")
        (out / "manifest.json").unlink()
    check_space(out, plan, done=bytes_there(out, records))
    if is_new and not config.dry_run:
        write_plan(out, plan, tokens)
    return plan, tokens


def _plan_of(config: DumpConfig, out: Path) -> tuple[Plan, Tokens, bool]:
    """The plan and its tokens, and whether it is new: not the one that lies in the folder."""
    loaded = load_config(config.target)
    dtype = target_dtype(config.target, loaded)
    settings = settings_of(config, dtype=dtype, batch_tokens=_batch_tokens(config))
    ours = fingerprint(config.target)
    if (out / "plan.json").is_file():
        plan = read_plan(out)
        differences = settings_differences(settings, plan.settings)
        check_same(out, differences + fingerprint_differences(ours, plan.fingerprint))
        return plan, read_tokens(out, plan, checksum=True), False
    plan, tokens = make_plan(
        config,
        load_tokenizer(config.target),
        out if out.is_dir() else Path(tempfile.gettempdir()),  # a dry run makes no folder
        fingerprint=ours,
        settings=settings,
        text_config=loaded.get_text_config(),
        dtype=dtype,
    )
    return plan, tokens, True


def run_shards(
    config: DumpConfig,
    out: Path,
    plan: Plan,
    *,
    rank: int,
    world: int,
    wait_for_everyone: Callable[[], None] = lambda: None,
) -> None:
    """Do the unfinished ones of shards rank, rank + world, …; a thread writes what is done."""
    tokens = read_tokens(out, plan)
    todo = _todo(out, plan, rank=rank, world=world)
    target = _start(config, out, plan, tokens, todo, world=world) if todo else None
    if plan.feature_dtype == "int8":
        if rank == 0:
            ensure_calibration(out, plan, tokens, lambda: target or _load(config, plan, tokens))
        wait_for_everyone()
    if target is None:
        return
    everyones = _and_unfinished(todo, out, plan)
    with progress(plan, tokens, todo, everyones=everyones, rank=rank) as advance:
        do_shards(target, out, plan, tokens, todo, advance=advance)


def do_shards(
    target: Target,
    out: Path,
    plan: Plan,
    tokens: Tokens,
    shards: Iterable[int],
    *,
    advance: Callable[[int], None],
) -> None:
    """Compute and write `shards`; `advance` is told the number of tokens of each batch."""
    calibration = None
    if plan.feature_dtype == "int8":
        calibration = read_calibration(out, calibration_record(out))
    with ThreadPoolExecutor(max_workers=1) as thread:
        writing: Future[None] | None = None
        for index in shards:
            stored, statistics = shard_features(
                target, plan, tokens, index, calibration=calibration, advance=advance
            )
            if writing is not None:
                writing.result()  # one shard in flight; an error of the thread is raised here
            writing = thread.submit(
                write, out, plan, tokens, index, stored, statistics, calibration=calibration
            )
        if writing is not None:
            writing.result()


def _load(config: DumpConfig, plan: Plan, tokens: Tokens) -> Target:
    """The target in the engine that the settings name."""
    if config.target.engine == "vllm":
        return load_vllm_target(
            config.target,
            max_length=int(tokens.lengths.max()),
            batch_tokens=plan.settings["batch_tokens"],
        )
    return load_target(config.target)


def _start(
    config: DumpConfig, out: Path, plan: Plan, tokens: Tokens, todo: list[int], *, world: int
) -> Target:
    """Load the target, check its output head on the first batch, and say how long it will take."""
    target = _load(config, plan, tokens)
    batches = batches_of(plan, tokens, todo[0])
    check_output_head(target, padded(tokens, batches[0])[0])
    rate = measured_rate(target, tokens, batches[len(batches) // 2])
    if process_state().is_main_process:
        everyones = _and_unfinished(todo, out, plan)
        log_time(target, plan, tokens, everyones, rate=rate, world=world)
    return target


def _todo(out: Path, plan: Plan, *, rank: int, world: int) -> list[int]:
    """The unfinished shards of one process, by their checksums."""
    mine = range(rank, len(plan.shards), world)
    some_are_there = any(shard_record(out, index, checksum=False) for index in mine)
    checked = tqdm(mine, desc="check shards", disable=rank != 0 or not some_are_there, delay=1)
    todo = [index for index in checked if shard_record(out, index, checksum=True) is None]
    if rank == 0 and len(todo) < len(mine):
        whose = "" if world == 1 else " of this process"
        log.info("resume: %d of %d shards%s are done", len(mine) - len(todo), len(mine), whose)
    return todo


def _and_unfinished(todo: list[int], out: Path, plan: Plan) -> list[int]:
    """The shards of all processes, whose checksums only they have looked at."""
    return sorted({*todo, *unfinished(out, plan)})


def _batch_tokens(config: DumpConfig) -> int:
    device = target_device(config.target).type
    default = BATCH_TOKENS["cpu" if device == "cpu" else "accelerator"]
    return default if config.batch_tokens is None else config.batch_tokens


def lock_cache(out: Path) -> contextlib.AbstractContextManager[None]:
    """Hold the folder against a second dump."""
    busy = f"Another dump is writing into {out}. Wait for it, or give another out=FOLDER."
    return locked(out / ".lock", busy=busy)
