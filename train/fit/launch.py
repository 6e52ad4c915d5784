"""Joining a launch, and refusing by name those under which training would not work."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    parse_flag_from_env,
)

from data.memory import keep_freed_pages
from data.processes import process_state, runs_on_cpu
from train.config import TrainConfig

TIMEOUT = timedelta(minutes=10)  # how long a process waits for the others before all of them end
SUPPORTED = (
    "What works, each with a file in conf/launch: one process (single.yaml), copies of the head "
    "(ddp.yaml), FSDP 2 (fsdp2.yaml), DeepSpeed ZeRO-2 and ZeRO-3 (zero2.yaml, zero3.yaml), on one "
    "machine or several (multinode.yaml); with --mixed_precision no or bf16."
)


def start_accelerator(config: TrainConfig) -> Accelerator:
    """Join the launch.

    Raises ValueError for one that cannot work, RuntimeError for processes that miss each other.
    """
    on_cpu, group = runs_on_cpu(), InitProcessGroupKwargs(timeout=TIMEOUT)
    deepspeed = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    if deepspeed:  # which calls functions of torch by their old names, at every step
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if on_cpu and deepspeed:
        # cpu=True would switch DeepSpeed off; without a backend each process would train alone.
        on_cpu, group.backend = False, "gloo"
    accelerator = Accelerator(
        cpu=on_cpu,
        gradient_accumulation_steps=1,
        log_with=config.tracker,
        project_dir=config.out,
        kwargs_handlers=[group],
    )
    launch = process_state()  # raises if the processes of this launch do not see each other
    wants_fsdp = parse_flag_from_env("ACCELERATE_USE_FSDP")
    if wants_fsdp and accelerator.distributed_type == DistributedType.MULTI_CPU:
        # Accelerate shards on accelerators only, and would quietly train whole copies here.
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
        accelerator.state.distributed_type = launch.distributed_type = DistributedType.FSDP
    if wrong := list(_unsupported(accelerator)):
        raise ValueError(f"Training does not work with {' and '.join(wrong)}. {SUPPORTED}")
    keep_freed_pages(accelerator.device)
    return accelerator


@contextmanager
def telling_lost_processes(accelerator: Accelerator, *, hint: str) -> Iterator[None]:
    """Turn what a backend says when a process is gone, or late by TIMEOUT, into a plain message."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.distributed.DistError) and "gloo" not in str(error):
            raise
        reason = str(error).strip().splitlines()[0]
        raise RuntimeError(
            f"Process {accelerator.process_index} of {accelerator.num_processes} has lost another "
            f"one, or waited {TIMEOUT} for it. What that one printed says why; here it was: "
            f"{reason}\n{hint}"
        ) from error


def _unsupported(accelerator: Accelerator) -> Iterator[str]:
    """What this launch asks for that training cannot give."""
    kind, compiler = accelerator.distributed_type, accelerator.state.dynamo_plugin.backend
    if kind == DistributedType.FSDP:
        plugin = accelerator.state.fsdp_plugin
        if plugin.fsdp_version != 2:
            yield f"fsdp_version: {plugin.fsdp_version}"
        policy = os.environ.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP")
        if policy != "NO_WRAP":  # the head calls parts of its layer: a unit there would never wake
            yield f"fsdp_auto_wrap_policy: {policy} (the head is one layer, so NO_WRAP)"
        if parse_flag_from_env("FSDP_OFFLOAD_PARAMS"):
            yield "fsdp_offload_params: true"
    elif kind == DistributedType.DEEPSPEED:
        zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        if zero["stage"] not in (2, 3):
            yield f"zero_stage: {zero['stage']}"
        for what in ("offload_optimizer", "offload_param"):
            if (device := (zero.get(what) or {}).get("device", "none")) != "none":
                yield f"{what}_device: {device}"
    elif kind in (DistributedType.MEGATRON_LM, DistributedType.XLA):
        yield kind.value
    if accelerator.mixed_precision not in ("no", "bf16"):
        yield f"--mixed_precision {accelerator.mixed_precision}"
    if compiler != DynamoBackend.NO:
        yield f"--dynamo_backend {compiler.value.lower()}"
