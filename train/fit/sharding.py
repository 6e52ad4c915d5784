"""The head and its AdamW moments as whole float32 tensors, however a launch shares them out.

FSDP2 and ZeRO-3 leave every process a slice of each parameter, and ZeRO-2 a slice of the moments.
Estimates and checkpoints want the tensors themselves: so an estimate is the same under every
launcher, and a run may go on under another one, or with another number of processes.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from train.head import DraftHead

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's state of a parameter, besides the step


def shares_out(accelerator: Accelerator) -> bool:
    """Whether a process may hold slices of parameters, or rounded ones, instead of the weights."""
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


def whole_head(accelerator: Accelerator, head: torch.nn.Module) -> DraftHead:
    """The head to read from, the same on every process. Collective: all of them must call it."""
    model: DraftHead = accelerator.unwrap_model(head)
    if not shares_out(accelerator):
        return model
    copy = DraftHead(model.config).to(accelerator.device)
    copy.load_state_dict(whole_weights(accelerator, head))
    return copy


def whole_weights(accelerator: Accelerator, head: torch.nn.Module) -> dict[str, Tensor]:
    """The trained float32 parameters by name, on every process. Collective."""
    named = accelerator.unwrap_model(head).named_parameters()
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        from deepspeed.utils import safe_get_full_fp32_param

        # Not its get_state_dict, which is bfloat16 under --mixed_precision bf16.
        return {name: safe_get_full_fp32_param(parameter) for name, parameter in named}
    return {name: _whole(parameter.detach()) for name, parameter in named}


def whole_moments(
    accelerator: Accelerator, head: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """AdamW's moments as `exp_avg.NAME` and `exp_avg_sq.NAME`, on the CPU. Collective.

    Only the main process gets them, one after the other: the others would hold them for nothing.
    """
    moments = {}
    for name, parameter in accelerator.unwrap_model(head).named_parameters():
        for key in MOMENTS:
            if accelerator.distributed_type == DistributedType.DEEPSPEED:
                from deepspeed.utils import safe_get_full_optimizer_state

                whole = safe_get_full_optimizer_state(parameter, key)
            else:
                whole = _whole(optimizer.state[parameter][key])
            if accelerator.is_main_process:
                moments[f"{key}.{name}"] = whole.cpu()
    return moments


def set_moments(
    accelerator: Accelerator,
    head: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    moments: dict[str, Tensor],
    *,
    step: int,
) -> None:
    """Put AdamW where it was after `step` updates, each process its own slices of `moments`."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        _set_deepspeed_moments(accelerator, head, moments, step)
        return
    named = accelerator.unwrap_model(head).named_parameters()  # the optimizer's order, too
    state = {
        i: {
            "step": torch.tensor(float(step)),
            **{key: _like(parameter, moments[f"{key}.{name}"]) for key in MOMENTS},
        }
        for i, (name, parameter) in enumerate(named)
    }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def set_master_weights(
    accelerator: Accelerator, head: torch.nn.Module, weights: dict[str, Tensor]
) -> None:
    """Give DeepSpeed its float32 weights, which it has made from rounded ones."""
    from deepspeed.utils import safe_set_full_fp32_param

    for name, parameter in accelerator.unwrap_model(head).named_parameters():
        if _is_zero_3(parameter):
            _set_zero_3(accelerator, parameter, weights[name])
        else:
            safe_set_full_fp32_param(parameter, weights[name].to(accelerator.device))


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(parameter: Tensor, whole: Tensor) -> Tensor:
    """`whole`, cut as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(
        whole.to(parameter.device), parameter.device_mesh, parameter.placements
    )


def _set_deepspeed_moments(
    accelerator: Accelerator, head: torch.nn.Module, moments: dict[str, Tensor], step: int
) -> None:
    """ZeRO keeps flat slices of many parameters; its own accessors find a parameter in them."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state, safe_set_full_optimizer_state

    zero: Any = head.optimizer
    for group, flat in _flat_slices(zero):
        zero.optimizer.state[flat] = {
            "step": torch.tensor(float(step)),
            **{key: torch.zeros_like(flat) for key in MOMENTS},
        }
        if group is not None:  # ZeRO-2 links parameters to their slices at its first step
            lazy_init_hp_params_optimizer_state(group, flat, zero.optimizer.state)
    for name, parameter in accelerator.unwrap_model(head).named_parameters():
        for key in MOMENTS:
            whole = moments[f"{key}.{name}"]
            if _is_zero_3(parameter):
                _set_zero_3(accelerator, parameter, whole, key)
            else:
                safe_set_full_optimizer_state(parameter, whole.to(accelerator.device), key)


def _flat_slices(zero: Any) -> Iterator[tuple[list[Tensor] | None, Tensor]]:
    """This process's float32 slices, with the parameters that each holds (ZeRO-3: None)."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        yield from ((None, flat) for flat in zero.fp32_partitioned_groups_flat)
    else:
        yield from zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True)


def _is_zero_3(parameter: Tensor) -> bool:
    return hasattr(parameter, "ds_tensor")


def _set_zero_3(
    accelerator: Accelerator, parameter: Tensor, whole: Tensor, key: str | None = None
) -> None:
    """Set this process's slice of a ZeRO-3 parameter, or of its moment `key`.

    Not by the safe_set_full_... of DeepSpeed, which runs over the end of a parameter whose size the
    processes do not divide.
    """
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
    padding = size * accelerator.num_processes - whole.numel()
    rank = accelerator.process_index
    own = F.pad(whole.flatten(), (0, padding))[rank * size : (rank + 1) * size]
    own = own.to(accelerator.device)
    if key is None:
        safe_set_local_fp32_param(parameter, own)
    else:
        safe_set_local_optimizer_state(parameter, own, key)
