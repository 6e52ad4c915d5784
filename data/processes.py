"""Which of the processes of a launch this one is."""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env

log = logging.getLogger(__name__)


def process_state(*, timeout: timedelta | None = None) -> PartialState:
    """The launch as Accelerate sees it; alone, a launch of one process.

    timeout: how long a process may wait for the others; null: the backend's default

    Raises RuntimeError if a launcher started several processes that do not see each other: each
    would take itself for the main one.
    """
    state = PartialState(cpu=runs_on_cpu(), **({} if timeout is None else {"timeout": timeout}))
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != state.num_processes:
        raise RuntimeError(
            f"The launcher started {launched} processes, but Accelerate sees {state.num_processes}."
            " Start with `accelerate launch --config_file conf/launch/….yaml -m scripts.NAME`."
        )
    return state


def runs_on_cpu() -> bool:
    """What to pass as `cpu=` to accelerate.

    Said openly, so that a launch of several processes forms a group where there is no accelerator.
    """
    # PartialState, unlike Accelerator, does not read this variable of `accelerate launch --cpu`.
    return parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()


def barrier(state: PartialState, *, timeout: timedelta) -> Callable[[], None]:
    """What each process of a launch calls to wait for the others.

    timeout: how long it waits for one that is at work; one that has stopped is noticed at once

    The function returned raises RuntimeError naming a process that has stopped.
    """
    if state.num_processes == 1:
        return lambda: None
    # gloo on any device: NCCL does not notice that a process has died, and would wait on.
    group = torch.distributed.new_group(backend="gloo", timeout=timeout)
    others = range(1, state.num_processes) if state.is_main_process else [0]
    token = torch.zeros(1)

    def exchange(act: Callable[..., object], rank: int) -> None:
        try:
            act(token, rank, group=group)
        except RuntimeError as error:
            raise RuntimeError(
                f"Process {rank} of {state.num_processes} has stopped (this is process "
                f"{state.process_index}). Its own message says why. What was written is whole: "
                "mend that, and run the same command again."
            ) from error

    def wait() -> None:
        # Not one of the collectives: they do not tell which process it was that has died.
        receive, send = torch.distributed.recv, torch.distributed.send
        for act in (receive, send) if state.is_main_process else (send, receive):
            for rank in others:
                exchange(act, rank)

    return wait


@contextlib.contextmanager
def stoppable(hint: str) -> Iterator[None]:
    """Have SIGTERM stop the block as Ctrl-C does, and log `hint` in both cases."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    # Python takes handlers from its main thread only.
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, interrupt) if in_main else None
    try:
        yield
    except KeyboardInterrupt:
        log.warning("%s", hint)
        raise
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)


def leave_launch() -> None:
    """Close the group of processes, at the very end of a script."""
    PartialState().destroy_process_group()
