"""Which of the processes of a launch this one is."""

import contextlib
import logging
import os
import re
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
    group = torch.distributed.new_group(backend="gloo")

    def wait() -> None:
        try:
            torch.distributed.monitored_barrier(group, timeout=timeout)
        except RuntimeError as error:
            # Process 0 learns which of them it is, the others only that process 0 is gone.
            culprit = re.search(r"Rank (\d+) failed", str(error))
            raise RuntimeError(
                f"Process {culprit[1] if culprit else 0} of {state.num_processes} has stopped "
                f"(this is process {state.process_index}). Its own message says why. What was "
                "written is whole: mend that, and run the same command again."
            ) from error

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
