"""How fast a dump is, how long it will take, and how far it is."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

from tqdm import tqdm

from data.cache.shards import padded
from data.chats.tokens import Tokens
from data.dump.plan import Plan
from data.targets.model import Target

log = logging.getLogger(__name__)


def measured_rate(target: Target, tokens: Tokens, batch: Sequence[int]) -> float:
    """Tokens a second of one forward, padding not counted."""
    input_ids, _ = padded(tokens, batch)
    started = time.monotonic()
    features = target.features(input_ids.to(target.device), tokens.lengths[batch])
    features[..., :1].cpu()  # waits for the device
    return int(tokens.lengths[batch].sum()) / (time.monotonic() - started)


def log_time(
    target: Target, plan: Plan, tokens: Tokens, todo: Sequence[int], *, rate: float, world: int
) -> None:
    """Say how long the shards `todo` will take: as long as the process that has most of them.

    rate: tokens a second of one process
    """
    parts = [
        num_tokens(plan, tokens, [index for index in todo if index % world == rank])
        for rank in range(world)
    ]
    of_all = "" if world == 1 else f"{sum(parts):,} tokens on {world} processes; the busiest has "
    log.info(
        "time: %s%s tokens / %s tokens/s (%s, %s, batches of %s tokens) = about %s",
        of_all,
        f"{max(parts):,}",
        f"{rate:,.0f}",
        target.place,
        target.dtype,
        f"{plan.settings['batch_tokens']:,}",
        timedelta(seconds=round(max(parts) / rate)),
    )


def num_tokens(plan: Plan, tokens: Tokens, shards: Sequence[int]) -> int:
    """Tokens of some shards."""
    bounds = [plan.shards[index] for index in shards]
    return sum(int(tokens.offsets[last] - tokens.offsets[first]) for first, last in bounds)


@contextlib.contextmanager
def progress(
    plan: Plan, tokens: Tokens, todo: Sequence[int], *, everyones: Sequence[int], rank: int
) -> Iterator[Callable[[int], None]]:
    """A bar over the tokens of all processes: each is taken to be as far as the first.

    todo:      shards of this process
    everyones: shards of all processes
    yields     what to call with the number of tokens of each batch that is done
    """
    own = num_tokens(plan, tokens, todo)
    total = num_tokens(plan, tokens, everyones)
    bar = tqdm(
        total=total,
        desc="dump",
        unit=" tokens",
        unit_scale=True,
        mininterval=1 if sys.stderr.isatty() else 30,  # a log file wants fewer lines
        disable=rank != 0,
    )
    done = 0

    def advance(num_tokens: int) -> None:
        nonlocal done
        done += num_tokens
        bar.update(round(total * done / own) - bar.n)

    with bar:
        yield advance
