"""Which of the processes of a launch this one is."""

import os
from datetime import timedelta

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env


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


def leave_launch() -> None:
    """Close the group of processes, at the very end of a script."""
    PartialState().destroy_process_group()
