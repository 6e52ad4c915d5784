"""Where the time of a generation goes."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Seconds:
    """Where the time of one generation went; of a batch: each prompt has the whole batch's."""

    total: float
    prefill: float  # the target over the prompt
    draft: float  # the head, its output head product included
    verify: float  # the target after the prompt, its output head product included

    @property
    def other(self) -> float:
        return self.total - self.prefill - self.draft - self.verify


class Clock:
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
