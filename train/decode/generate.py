"""The generation loops, with a head and without: the same machinery, the same tokens."""

import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from data.target import Target
from train.decode.chain import DraftCache, draft_chain
from train.decode.verify import TargetStream, count_accepted
from train.head import DraftHead


@dataclass(frozen=True)
class Seconds:
    """Where the time of one generation went."""

    total: float
    prefill: float  # the target over the prompt
    draft: float  # the head, its output head product included
    verify: float  # the target after the prompt, its output head product included

    @property
    def other(self) -> float:
        return self.total - self.prefill - self.draft - self.verify


@dataclass(frozen=True)
class Generation:
    """What one prompt was answered with."""

    tokens: list[int]  # the stop token included, if one was reached
    seconds: Seconds
    # Accepted draft tokens of each verification, before the answer is cut at a stop token or at
    # max_new_tokens, as vLLM counts. The first token comes from the prefill and is no round.
    accepted: list[int] = field(default_factory=list)


@torch.inference_mode()
def speculative_generate(
    target: Target,
    head: DraftHead,
    input_ids: Tensor,
    *,
    num_steps: int,
    max_new_tokens: int,
    stop_ids: Collection[int],
) -> Generation:
    """Continue `input_ids` greedily with drafts of `num_steps` tokens: `plain_generate`, faster.

    input_ids: [T]  the prompt, at least one token

    In round r the sequence is x_0 ... x_L; the target has seen all but x_L. The head drafts
    d_1 ... d_K, the target runs [x_L, d_1, ..., d_K], and what it confirms is the next round's
    real pairs. The device is waited for once a round, to learn how many.
    """
    _check(input_ids, max_new_tokens, num_steps)
    input_ids = input_ids.to(target.device)
    clock = _Clock(target.device)
    stream = TargetStream(target)
    cache = DraftCache(head, len(input_ids) + max_new_tokens + num_steps)

    with clock.phase("prefill"):
        features = stream.append(input_ids)  # [L, H]
        newest = target.head.logits(features[-1:]).argmax(dim=-1)  # x_L: [1]
        tokens, finished = _cut(newest.tolist(), max_new_tokens, stop_ids)
    pair_tokens = torch.cat([input_ids[1:], newest])  # [L]

    accepted = []
    while not finished:
        with clock.phase("draft"):
            drafted = draft_chain(
                head, target.head, cache, features, pair_tokens, num_steps=num_steps
            )  # [K]
        with clock.phase("verify"):
            features = stream.append(torch.cat([newest, drafted]))  # [K+1, H]
            predicted = target.head.logits(features).argmax(dim=-1)  # [K+1]
            on_host = torch.cat([drafted, predicted]).tolist()

        count = count_accepted(on_host[:num_steps], on_host[num_steps:])
        accepted.append(count)
        stream.drop(num_steps - count)
        features, pair_tokens = features[: count + 1], predicted[: count + 1]
        newest = pair_tokens[-1:]
        confirmed = on_host[num_steps : num_steps + count + 1]
        kept, finished = _cut(confirmed, max_new_tokens - len(tokens), stop_ids)
        tokens += kept
    return Generation(tokens, clock.seconds(), accepted)


@torch.inference_mode()
def plain_generate(
    target: Target, input_ids: Tensor, *, max_new_tokens: int, stop_ids: Collection[int]
) -> Generation:
    """Continue `input_ids` greedily, one token a forward. input_ids: [T], at least one token."""
    _check(input_ids, max_new_tokens)
    clock = _Clock(target.device)
    stream = TargetStream(target)
    newest = input_ids.to(target.device)
    tokens: list[int] = []
    finished = False
    while not finished:
        with clock.phase("verify" if tokens else "prefill"):
            features = stream.append(newest)
            newest = target.head.logits(features[-1:]).argmax(dim=-1)  # [1]
            on_host = newest.tolist()
        kept, finished = _cut(on_host, max_new_tokens - len(tokens), stop_ids)
        tokens += kept
    return Generation(tokens, clock.seconds())


def stop_ids_of(target: Target) -> frozenset[int]:
    """The tokens that end a reply: the tokenizer's and the generation config's, as in vLLM."""
    ids = {target.tokenizer.eos_token_id}
    generation_config = getattr(target.model, "generation_config", None)
    eos = getattr(generation_config, "eos_token_id", None)
    ids.update(eos if isinstance(eos, list) else [eos])
    return frozenset(ids - {None})


def _cut(new: list[int], room: int, stop_ids: Collection[int]) -> tuple[list[int], bool]:
    """The part of `new` that one-by-one decoding would reach, and whether it ends there."""
    for i, token in enumerate(new[:room]):
        if token in stop_ids:
            return new[: i + 1], True
    return new[:room], len(new) >= room


def _check(input_ids: Tensor, max_new_tokens: int, num_steps: int = 1) -> None:
    if input_ids.dim() != 1 or not len(input_ids):
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)}; expected [T] with at least one token."
        )
    if max_new_tokens < 1 or num_steps < 1:
        raise ValueError(
            f"max_new_tokens is {max_new_tokens} and num_steps is {num_steps}; both must be at "
            "least 1."
        )


class _Clock:
    """Adds up the time of named phases; on a GPU by events, so that measuring waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple] = []
        self._start = self._now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self._now()
        yield
        self._spans.append((name, start, self._now()))

    def seconds(self) -> Seconds:
        end = self._now()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        sums: dict[str, float] = defaultdict(float)
        for name, start, stop in self._spans:
            sums[name] += self._between(start, stop)
        return Seconds(
            total=self._between(self._start, end),
            prefill=sums["prefill"],
            draft=sums["draft"],
            verify=sums["verify"],
        )

    def _now(self):
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _between(self, start, stop) -> float:
        if self._device.type != "cuda":
            return stop - start
        return start.elapsed_time(stop) / 1000  # milliseconds
