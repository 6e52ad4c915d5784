"""One shard of a dump: batches through the backbone, rows into plan order, one file."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from data.cache import shard_path, write_shard
from data.plan import Plan
from data.target import Target
from data.tokens import Tokens


def cut_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices of each batch, longest first: up to `batch_tokens` with padding, or one sequence."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    batches: list[list[int]] = []
    for index in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def batches_of(plan: Plan, tokens: Tokens, index: int) -> list[list[int]]:
    """The sequences of each batch of one shard."""
    first, last = plan.shards[index]
    batches = cut_batches(tokens.lengths[first:last].tolist(), plan.settings["batch_tokens"])
    return [[first + i for i in batch] for batch in batches]


def padded(tokens: Tokens, sequences: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Token ids of some sequences, padded on the right, and where the real ones are.

    returns  input_ids [B, T] int64
             rows      [N]    int64  indices into the B * T positions, sequence by sequence
    """
    bounds = [tokens.offsets[s : s + 2].tolist() for s in sequences]
    width = max(end - begin for begin, end in bounds)
    input_ids = torch.zeros(len(bounds), width, dtype=torch.int64)
    for row, (begin, end) in zip(input_ids, bounds, strict=True):
        row[: end - begin] = tokens.input_ids[begin:end]
    lengths = torch.tensor([end - begin for begin, end in bounds])
    is_token = torch.arange(width) < lengths[:, None]  # [B, T]
    return input_ids, is_token.flatten().nonzero().squeeze(1)


def shard_features(
    target: Target, plan: Plan, tokens: Tokens, index: int, *, advance: Callable[[int], None]
) -> tuple[Tensor, dict[str, float]]:
    """Features of shard `index` in plan order, and statistics of them.

    advance: called with the number of tokens of each finished batch
    returns  [T, H] in the plan's feature_dtype, on the target's device

    Raises ValueError with the conversation's id for a feature that is not finite.
    """
    first, last = plan.shards[index]
    begin, end = tokens.offsets[[first, last]].tolist()
    dtype = getattr(torch, plan.feature_dtype)
    # The whole shard stays on the device: one wait and one copy per shard, not per batch.
    features = torch.empty(end - begin, plan.hidden_size, dtype=dtype, device=target.device)
    largest = torch.empty(end - begin, dtype=dtype, device=target.device)
    for batch in batches_of(plan, tokens, index):
        input_ids, rows = padded(tokens, batch)
        places = torch.cat([torch.arange(*tokens.offsets[s : s + 2].tolist()) for s in batch])
        places = (places - begin).to(target.device)
        hidden = _forward(target, input_ids).flatten(0, 1)  # [B * T, H]
        hidden = hidden[rows.to(target.device)].to(dtype)  # [N, H]
        features[places] = hidden
        largest[places] = hidden.abs().amax(dim=1)
        advance(len(rows))
    _check_finite(largest, plan, tokens, begin, dtype=target.dtype)
    return features, {"max_abs": float(largest.max())}


def write(
    cache: Path,
    plan: Plan,
    tokens: Tokens,
    index: int,
    features: Tensor,
    statistics: dict[str, float],
) -> None:
    """Write what `shard_features` returned. Raises RuntimeError if the disk does not take it."""
    first, last = plan.shards[index]
    offsets = tokens.offsets[first : last + 1]
    begin, end = offsets[[0, -1]].tolist()
    try:
        write_shard(
            cache,
            index,
            features=_to_cpu(features),
            input_ids=tokens.input_ids[begin:end],
            loss_mask=tokens.loss_mask[begin:end],
            offsets=offsets - begin,
            statistics=statistics,
        )
    except (OSError, SafetensorError) as error:
        raise RuntimeError(
            f"Cannot write {shard_path(cache, index)}: {error}. The shards before it are whole: "
            "mend the disk (free space?) and run the same command again; it goes on from there."
        ) from error


def _forward(target: Target, input_ids: Tensor) -> Tensor:
    try:
        return target.features(input_ids.to(target.device))
    except torch.OutOfMemoryError as error:
        rows, width = input_ids.shape
        raise RuntimeError(
            f"A batch of {rows} x {width} tokens does not fit into the memory of {target.device}. "
            f"Give a smaller batch_tokens (at most {rows * width // 2}) and another out=FOLDER, or "
            "a shorter max_length."
        ) from error


def _check_finite(
    largest: Tensor, plan: Plan, tokens: Tokens, begin: int, *, dtype: torch.dtype
) -> None:
    wrong = ~largest.isfinite()
    if wrong.any():
        row = begin + int(wrong.nonzero()[0])
        sequence = int(torch.searchsorted(tokens.offsets, row, right=True)) - 1
        raise ValueError(
            f"The target gives a feature that is not finite in {dtype}: token "
            f"{row - int(tokens.offsets[sequence])} of conversation "
            f"{plan.sequence_ids[sequence]!r} (and {int(wrong.sum()) - 1} more tokens of its "
            "shard). float16 overflows in some models: try target.dtype=bfloat16 or float32."
        )


def _to_cpu(features: Tensor) -> Tensor:
    if features.device.type != "cuda":
        return features.cpu()
    # Runs in the writer's thread: its own stream and pinned memory let the next shard go on.
    with torch.cuda.stream(torch.cuda.Stream(features.device)):
        copy = torch.empty(features.shape, dtype=features.dtype, pin_memory=True)
        copy.copy_(features, non_blocking=True)
        torch.cuda.current_stream().synchronize()
    return copy
