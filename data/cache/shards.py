"""One shard of a dump: batches through the backbone, rows into plan order, one file."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from data.cache.quantise import quantise
from data.cache.reader import Calibration, shard_path, write_shard
from data.chats.tokens import Tokens
from data.dump.plan import Plan
from data.files import writing
from data.targets.model import Target


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


def features_of(
    target: Target, tokens: Tokens, batches: Iterable[Sequence[int]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The features of one batch of sequences after the other.

    yields  places [N]     int64  which rows of `tokens` they belong to, on the CPU
            hidden [N, H]  in the target's dtype, on its device
    """
    for batch in batches:
        input_ids, rows = padded(tokens, batch)
        places = torch.cat([torch.arange(*tokens.offsets[s : s + 2].tolist()) for s in batch])
        hidden = _forward(target, input_ids, tokens.lengths[batch]).flatten(0, 1)  # [B * T, H]
        yield places, hidden[rows.to(target.device)]


def shard_features(
    target: Target,
    plan: Plan,
    tokens: Tokens,
    index: int,
    *,
    calibration: Calibration | None,
    advance: Callable[[int], None],
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Features of shard `index` in plan order, and statistics of them.

    calibration: of a plan with feature_dtype int8, None for the others
    advance:     called with the number of tokens of each finished batch
    returns      features    [T, H] in the plan's feature_dtype, on the target's device
                 token_scale [T]    float32, with int8 only

    Raises ValueError with the conversation's id for a feature that is not finite.
    """
    first, last = plan.shards[index]
    begin, end = tokens.offsets[[first, last]].tolist()
    dtype, device = getattr(torch, plan.feature_dtype), target.device
    # The whole shard stays on the device: one wait and one copy per shard, not per batch.
    stored = {"features": torch.empty(end - begin, plan.hidden_size, dtype=dtype, device=device)}
    largest = torch.empty(end - begin, device=device)
    channel_scale = None
    if calibration is not None:
        stored["token_scale"] = torch.empty(end - begin, device=device)
        channel_scale = calibration.channel_scale.to(device)
    for places, hidden in features_of(target, tokens, batches_of(plan, tokens, index)):
        here = (places - begin).to(device)
        if channel_scale is None:
            hidden = hidden.to(dtype)
            stored["features"][here] = hidden
        else:
            stored["features"][here], stored["token_scale"][here] = quantise(hidden, channel_scale)
        largest[here] = hidden.abs().amax(dim=1).float()
        advance(len(places))
    sequence_ids = plan.sequence_ids[first:last]
    offsets = tokens.offsets[first : last + 1] - begin
    check_finite(largest, sequence_ids, offsets, dtype=target.dtype)
    return stored, {"max_abs": float(largest.max())}


def check_finite(
    largest: Tensor, sequence_ids: Sequence[str], offsets: Tensor, *, dtype: torch.dtype
) -> None:
    """Raise ValueError, naming the first conversation, if a token's feature is not finite.

    largest: [T]    largest magnitude of each token's feature
    offsets: [S+1]  sequence s is rows offsets[s]:offsets[s+1] of them
    dtype:   what the target computed in
    """
    wrong = ~largest.isfinite()
    if wrong.any():
        row = int(wrong.nonzero()[0])
        sequence = int(torch.searchsorted(offsets, row, right=True)) - 1
        raise ValueError(
            f"The target gives a feature that is not finite in {dtype}: token "
            f"{row - int(offsets[sequence])} of conversation {sequence_ids[sequence]!r} (and "
            f"{int(wrong.sum()) - 1} more of the {len(largest)} tokens computed with it). float16 "
            "overflows in some models: try target.dtype=bfloat16 or float32."
        )


def write(
    cache: Path,
    plan: Plan,
    tokens: Tokens,
    index: int,
    stored: dict[str, Tensor],
    statistics: dict[str, float],
    *,
    calibration: Calibration | None,
) -> None:
    """Write what `shard_features` returned. Raises RuntimeError if the disk does not take it."""
    first, last = plan.shards[index]
    offsets = tokens.offsets[first : last + 1]
    begin, end = offsets[[0, -1]].tolist()
    with writing(shard_path(cache, index)):
        write_shard(
            cache,
            index,
            stored={name: _to_cpu(tensor) for name, tensor in stored.items()},
            input_ids=tokens.input_ids[begin:end],
            loss_mask=tokens.loss_mask[begin:end],
            offsets=offsets - begin,
            statistics=statistics,
            calibration=calibration,
        )


def _forward(target: Target, input_ids: Tensor, lengths: Tensor) -> Tensor:
    try:
        return target.features(input_ids.to(target.device), lengths)
    except torch.OutOfMemoryError as error:
        rows, width = input_ids.shape
        raise RuntimeError(
            f"A batch of {rows} x {width} tokens does not fit into the memory of {target.device}. "
            f"Give a smaller batch_tokens (at most {rows * width // 2}) and another out=FOLDER, or "
            "a shorter max_length."
        ) from error


def _to_cpu(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor.cpu()
    # Runs in the writer's thread: its own stream and pinned memory let the next shard go on.
    with torch.cuda.stream(torch.cuda.Stream(tensor.device)):
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream().synchronize()
    return copy
