"""Packed batches of cached features: no padding, and an order that is a pure function of the seed.

An optimizer step is a set of sequences, chosen without regard to how many processes there are. How
the set is cut into processes and forwards changes nothing but rounding.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from data.cache.reader import FeatureCache, supervised_pairs

PREFETCHED_STEPS = 2
T = TypeVar("T")


@dataclass
class PackedBatch:
    """Pairs of a few documents, one after the other.

    A document ends with its last supervised pair: what follows is causal and would change nothing.
    """

    sequences: list[int]  # indices in the cache, one per document; [-1] for an empty batch
    lengths: list[int]  # pairs of each document, summing to T; [0] for an empty batch
    next_ids: Tensor  # [T]     t_{j+1}
    features: Tensor  # [T, H]  f_j
    supervised: Tensor  # [N]   indices of supervised pairs among the T
    target_features: Tensor  # [N, H]  f_{j+1} at supervised pairs

    def to(self, device: torch.device) -> "PackedBatch":
        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return PackedBatch(
            self.sequences,
            self.lengths,
            move(self.next_ids),
            move(self.features),
            move(self.supervised),
            move(self.target_features),
        )


def pack(cache: FeatureCache, sequences: Sequence[int], *, pin: bool = False) -> PackedBatch:
    """Read `sequences` from the cache and lay their pairs one after the other."""
    kept, lengths, next_ids, features, supervised, targets = [], [], [], [], [], []
    offset = 0
    for index in sequences:
        sequence = cache.sequence(index)
        pairs = supervised_pairs(sequence.loss_mask).nonzero().squeeze(1)
        if not len(pairs):
            continue
        length = int(pairs[-1]) + 1
        kept.append(index)
        lengths.append(length)
        next_ids.append(sequence.input_ids[1 : length + 1])
        features.append(sequence.features[:length])
        supervised.append(pairs + offset)
        targets.append(sequence.features[pairs + 1])
        offset += length

    def join(parts: list[Tensor], *empty_shape: int, dtype: torch.dtype) -> Tensor:
        joined = torch.cat(parts) if parts else torch.empty(empty_shape, dtype=dtype)
        return joined.pin_memory() if pin else joined

    return PackedBatch(
        sequences=kept or [-1],
        lengths=lengths or [0],
        next_ids=join(next_ids, 0, dtype=torch.long),
        features=join(features, 0, cache.hidden_size, dtype=cache.dtype),
        supervised=join(supervised, 0, dtype=torch.long),
        target_features=join(targets, 0, cache.hidden_size, dtype=cache.dtype),
    )


def plan_epoch(
    sequences: Sequence[int], lengths: Tensor, *, seed: int, epoch: int, batch_tokens: int
) -> list[list[int]]:
    """Shuffle `sequences` and cut them into optimizer steps of about `batch_tokens` tokens.

    sequences: indices in the cache
    lengths:   [S] tokens of every sequence of the cache
    returns    the sequences of each step; each is at most batch_tokens long, or one sequence
    """
    generator = torch.Generator().manual_seed(_mix(seed, epoch))
    order = torch.randperm(len(sequences), generator=generator).tolist()
    return _cut([sequences[i] for i in order], lengths, batch_tokens)


def split_step(
    sequences: Sequence[int], lengths: Tensor, *, world_size: int, micro_batch_tokens: int
) -> list[list[list[int]]]:
    """Share one step's sequences out to processes, and each share to forwards.

    Longest first to the process with the fewest tokens. Every process gets the same number of
    forwards, some of them empty if need be, so that collective calls meet.

    returns  [world_size][micro_batches] lists of sequences
    """
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for index in sorted(sequences, key=lambda i: (-int(lengths[i]), i)):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += int(lengths[index])
    cut = [_cut(share, lengths, micro_batch_tokens) for share in shares]
    most = max(len(micro_batches) for micro_batches in cut)
    return [micro_batches + [[]] * (most - len(micro_batches)) for micro_batches in cut]


def _cut(sequences: Sequence[int], lengths: Tensor, tokens: int) -> list[list[int]]:
    parts: list[list[int]] = []
    room = 0
    for index in sequences:
        length = int(lengths[index])
        if not parts or length > room:
            parts.append([])
            room = tokens
        parts[-1].append(index)
        room -= length
    return parts


def _mix(*values: int) -> int:
    """One 63-bit seed out of several numbers (tuples of ints hash the same in every process)."""
    return hash(values) & (2**63 - 1)


def add_noise(batch: PackedBatch, *, kind: str, width: float, seed: int, epoch: int) -> Tensor:
    """Input features with uniform noise, the same for a sequence however the batch was cut.

    kind     paper: U(-w, w) (EAGLE, section 4.2); reference: that times 512 / pairs of the
             document, as the papers' code does; none
    width    w, in units of the feature
    returns  [T, H] float32
    """
    features = batch.features.float()
    if kind == "none":
        return features
    parts = []
    for index, part in zip(batch.sequences, features.split(batch.lengths), strict=True):
        generator = torch.Generator(device=features.device).manual_seed(_mix(seed, epoch, index))
        noise = torch.rand(part.shape, generator=generator, device=features.device)
        scale = width * (512 / max(len(part), 1) if kind == "reference" else 1.0)
        parts.append(part + (noise * 2 - 1) * scale)
    return torch.cat(parts)


def prefetch(steps: Iterable[T], load: Callable[[T], object]) -> Iterator:
    """Run `load` on each of `steps` in a thread, a few steps ahead; errors reach the caller."""
    ready: queue.Queue = queue.Queue(maxsize=PREFETCHED_STEPS)
    stopped = threading.Event()

    def put(item: tuple[object, BaseException | None]) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for step in steps:
                if not put((load(step), None)):
                    return
            put((None, StopIteration()))
        except BaseException as error:
            put((None, error))

    threading.Thread(target=work, daemon=True, name="prefetch").start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
    finally:
        stopped.set()
