"""What a run will do, before it does it: the split, every optimizer step, the learning rate."""

import math
from dataclasses import dataclass

from data.batches import plan_epoch
from data.cache.reader import FeatureCache
from data.chats.split import is_heldout, stem
from train.config import TokenMapConfig, TrainConfig


@dataclass(frozen=True)
class Step:
    """One optimizer step: a set of sequences, the same whatever the number of processes."""

    number: int  # from 1
    epoch: int  # from 0
    sequences: list[int]  # indices in the cache
    num_supervised: int  # pairs, over all processes


def split_cache(
    cache: FeatureCache, config: TrainConfig | TokenMapConfig
) -> tuple[list[int], list[int]]:
    """Sequences to train on, and held-out ones (up to heldout.max_tokens), by conversation.

    Raises ValueError if one of the two is empty, RuntimeError if a chat has parts in both.
    """
    share, seed = config.heldout.share, config.seed
    training, heldout, room = [], [], config.heldout.max_tokens or cache.manifest["num_tokens"]
    for index, name in enumerate(cache.ids):
        if not int(cache.num_supervised[index]):
            continue
        if not is_heldout(name, share=share, seed=seed):
            training.append(index)
        elif room > 0:
            heldout.append(index)
            room -= int(cache.lengths[index])
    if share > 0 and not heldout:
        raise ValueError(
            f"heldout.share={share} holds none of the {len(training)} sequences of {cache.path} "
            f"out, so acceptance could not be measured: they are parts of "
            f"{len(chats_of(cache, training))} chats (ids alike up to _NUMBER). Raise "
            "heldout.share or dump more conversations; heldout.share=0 trains without an estimate."
        )
    if not training:
        raise ValueError(
            f"{cache.path} has {len(cache)} sequences, and none with a supervised position is left "
            f"to train on (heldout.share={share}). Dump more conversations or lower the share."
        )
    if overlap := sorted(chats_of(cache, training) & chats_of(cache, heldout)):
        raise RuntimeError(
            f"{len(overlap)} chats of {cache.path} have parts on both sides of the split, "
            f"{overlap[0]!r} for one: acceptance would be measured on what was trained."
        )
    return training, heldout


def chats_of(cache: FeatureCache, sequences: list[int]) -> set[str]:
    """The chats that sequences are parts of, by the stems of their ids."""
    return {stem(cache.ids[index]) for index in sequences}


def plan_steps(cache: FeatureCache, training: list[int], config: TrainConfig) -> list[Step]:
    """Every optimizer step of the run. Depends on nothing but the cache and the settings."""
    steps: list[Step] = []
    epoch = 0
    while epoch < config.epochs if config.max_steps is None else len(steps) < config.max_steps:
        cut = plan_epoch(
            training,
            cache.lengths,
            seed=config.seed,
            epoch=epoch,
            batch_tokens=config.batch_tokens,
        )
        for sequences in cut:
            count = int(cache.num_supervised[sequences].sum())
            steps.append(Step(len(steps) + 1, epoch, sequences, count))
        epoch += 1
    return steps[: config.max_steps]


def learning_rate(step: int, total: int, config: TrainConfig) -> float:
    """Linear warm-up, then a cosine that reaches zero with the run's last step. step: from 1."""
    warmup = config.warmup if config.warmup >= 1 else config.warmup * total
    if step <= warmup:
        return config.lr * step / warmup
    progress = (step - warmup) / max(1.0, total - warmup + 1)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))
