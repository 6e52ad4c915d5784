"""The calibration of an int8 cache: the channels' scales, and what storing int8 costs.

Done once, by the main process, before the first shard. Which tokens it looks at follows from the
plan alone, so a resumed dump would find the same.
"""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from data.cache.quantise import Cost, channel_scales, dequantise, quantise
from data.cache.reader import calibration_path, calibration_record, shard_record
from data.cache.shards import check_finite, cut_batches, features_of
from data.chats.tokens import Tokens
from data.dump.plan import TOKEN_BYTES, Plan, auto_feature_dtype
from data.files import atomic_write, write_json, writing
from data.targets.model import Target, TargetHead

log = logging.getLogger(__name__)

CALIBRATION_TOKENS, HELDOUT_TOKENS = 8192, 4096
START = 512  # tokens used of a sequence, so that the sample is of many chats
# Without channel scales 3.2 % of SmolLM2's argmaxes change, and noise of the training's width
# changes 4 %: labels that wrong are no longer the target's.
MAX_FLIPS = 0.03
LOGIT_BYTES = 2**26  # of one block of logits, of which a few are held


def ensure_calibration(out: Path, plan: Plan, tokens: Tokens, target: Callable[[], Target]) -> None:
    """Calibrate unless it is done. Main process only, before the first shard is written.

    target: called if it has to be done

    Raises ValueError if shards were written with another calibration, or for a feature that is not
    finite, and RuntimeError if the disk does not take it.
    """
    record = calibration_record(out)
    content = None
    if record is None:
        channel_scale, record = calibrate(target(), plan, tokens)
        content = save({"channel_scale": channel_scale})
        record = {"sha256": hashlib.sha256(content).hexdigest(), **record}
    _check_shards(out, plan, record["sha256"])
    if content is not None:
        with writing(calibration_path(out)):
            with atomic_write(calibration_path(out)) as tmp:
                tmp.write_bytes(content)
            write_json(calibration_path(out).with_suffix(".json"), record)
    _report(plan, record)


def calibrate(target: Target, plan: Plan, tokens: Tokens) -> tuple[Tensor, dict[str, Any]]:
    """Compute the channels' scales on some sequences, and what they cost on others.

    returns  channel_scale [H] float32, on the CPU; the record but for its checksum
    """
    measured_on, heldout = calibration_sequences(tokens.lengths)
    sample = _starts(tokens, measured_on + heldout)
    sequence_ids = [plan.sequence_ids[index] for index in measured_on + heldout]
    features = _features(target, plan, sample, sequence_ids)
    count = int(sample.offsets[len(measured_on)])
    if not heldout:  # a single sequence: its last third
        count -= count // 3
    channel_scale = channel_scales(features[:count])

    def through_int8(rows: Tensor) -> Tensor:
        return dequantise(*quantise(rows, channel_scale), channel_scale)

    plain = auto_feature_dtype(target.dtype)
    ways = {"int8": through_int8, plain: lambda rows: rows.to(getattr(torch, plain))}
    costs = storage_costs(target.head, features[count:], ways)
    record = {
        "calibration_tokens": count,
        "heldout_tokens": len(features) - count,
        "costs": {name: asdict(cost) for name, cost in costs.items()},
    }
    return channel_scale.cpu(), record


def calibration_sequences(lengths: Tensor) -> tuple[list[int], list[int]]:
    """Which sequences to calibrate on, and which others to measure the cost on.

    lengths: [S]  tokens of every sequence of the plan
    returns  up to 8,192 or two thirds of the tokens; up to 4,096 tokens, none if S is 1
    """
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0)).tolist()
    used = lengths.clamp(max=START)

    def take(sequences: list[int], room: int) -> list[int]:
        taken = []
        for index in sequences:
            if room <= 0:
                break
            taken.append(index)
            room -= int(used[index])
        return taken

    first = take(order, min(CALIBRATION_TOKENS, 2 * int(used.sum()) // 3))
    return first, take(order[len(first) :], HELDOUT_TOKENS)


@torch.no_grad()
def storage_costs(
    head: TargetHead, features: Tensor, ways: dict[str, Callable[[Tensor], Tensor]]
) -> dict[str, Cost]:
    """Through the target's own output head, in blocks: [N, V] is never held.

    features: [N, H]  as the target gave them
    ways:     what each way of storing makes of a block of rows, [R, H] -> [R, H]
    """
    totals = {name: torch.zeros(3, dtype=torch.float64, device=features.device) for name in ways}
    power = torch.zeros((), dtype=torch.float64, device=features.device)
    for rows in features.split(max(1, LOGIT_BYTES // (4 * len(head.weight)))):
        log_probs = head.logits(rows).log_softmax(-1)  # [R, V]
        probs, argmax = log_probs.exp(), log_probs.argmax(-1)
        power += rows.double().square().sum()
        for name, way in ways.items():
            stored = way(rows)
            stored_log_probs = head.logits(stored).log_softmax(-1)
            flips = (stored_log_probs.argmax(-1) != argmax).sum()
            # The difference first: each sum alone is a thousand times the KL, and rounds it away.
            kl = (probs * (log_probs - stored_log_probs)).sum(-1).double().sum()
            error = (stored.double() - rows.double()).square().sum()
            totals[name] += torch.stack([kl, flips.double(), error])
    return {name: _cost(total, power, len(features)) for name, total in totals.items()}


def _cost(total: Tensor, power: Tensor, count: int) -> Cost:
    kl, flips, error = (total / torch.stack([total.new_tensor(count)] * 2 + [power])).tolist()
    # Three digits: more are noise, and would differ between machines.
    return Cost(*(float(f"{max(value, 0):.3g}") for value in (kl, flips, error**0.5)))


def _starts(tokens: Tokens, sequences: list[int]) -> Tokens:
    """The first tokens of some sequences; what follows them changes none of their features."""
    lengths = tokens.lengths[sequences].clamp(max=START)
    begins = tokens.offsets[sequences]
    rows = [slice(b, b + n) for b, n in zip(begins.tolist(), lengths.tolist(), strict=True)]
    return Tokens(
        input_ids=torch.cat([tokens.input_ids[part] for part in rows]),
        loss_mask=torch.cat([tokens.loss_mask[part] for part in rows]),
        offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
    )


def _features(target: Target, plan: Plan, sample: Tokens, sequence_ids: list[str]) -> Tensor:
    """[N, H] in the target's dtype, on its device."""
    shape = len(sample.input_ids), plan.hidden_size
    features = torch.empty(shape, dtype=target.dtype, device=target.device)
    batches = cut_batches(sample.lengths.tolist(), plan.settings["batch_tokens"])
    shown = tqdm(batches, desc="calibrate int8", unit=" batches", delay=1)
    for places, hidden in features_of(target, sample, shown):
        features[places.to(target.device)] = hidden
    largest = features.abs().amax(dim=1)
    check_finite(largest, sequence_ids, sample.offsets, dtype=target.dtype)
    return features


def _check_shards(out: Path, plan: Plan, checksum: str) -> None:
    """Refuse to go on if a shard was quantised with other scales."""
    for index in range(len(plan.shards)):
        record = shard_record(out, index, checksum=False)
        if record is not None and record["calibration"] != checksum:
            raise ValueError(
                f"{out / record['file']} was quantised with the calibration "
                f"{record['calibration'][:16]}, but here it comes to {checksum[:16]}: the machine "
                f"or the libraries round otherwise. Put {calibration_path(out)} and its .json back "
                f"from a copy, or delete {out / 'shards'} to do all shards again."
            )


def _report(plan: Plan, record: dict[str, Any]) -> None:
    costs = {name: Cost(**cost) for name, cost in record["costs"].items()}
    log.info(
        "%s (on %s held-out tokens)",
        "; ".join(f"{name}: {cost}" for name, cost in costs.items()),
        f"{record['heldout_tokens']:,}",
    )
    log.info(
        "int8: %s instead of %s bytes a token",
        f"{plan.bytes_per_token:,}",
        f"{2 * plan.hidden_size + TOKEN_BYTES:,}",
    )
    if costs["int8"].flips > MAX_FLIPS:
        log.warning(
            "int8 changes %.1f %% of this target's most likely tokens, more than %.0f %%: a head "
            "would learn wrong labels. Dump with feature_dtype=auto.",
            100 * costs["int8"].flips,
            100 * MAX_FLIPS,
        )
