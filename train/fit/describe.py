"""What a run says of itself: the first lines of the log, and RUN/run.json.

RUN/run.json
    id          random, once: trackers go on under it
    settings    those of the last start
    steps       how many the run has
    replies     who wrote the text that was learned
    starts      for each time it was started: the step after which, command, launch, versions
    result      null until it is over: the last step, and why it was the last
"""

import logging
import os
import subprocess
import sys
import uuid
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from data.cache.quantise import Cost
from data.cache.reader import FeatureCache
from data.files import read_json, write_json
from data.replies.origin import describe_replies
from train.config import TrainConfig
from train.fit.plan import chats_of
from train.head import DraftHead

log = logging.getLogger(__name__)
FORMAT_VERSION = 1
MADE_BY = "python -m scripts.train_head"


def describe_run(
    config: TrainConfig,
    cache: FeatureCache,
    head: DraftHead,
    training: list[int],
    heldout: list[int],
    total: int,
    start: int,
    accelerator: Accelerator,
) -> None:
    """Print what follows from the settings. Main process only."""
    pairs = int(cache.num_supervised[training].sum())
    trainable = sum(parameter.numel() for parameter in head.parameters())
    shape = head.config
    log.info(
        "target %s: hidden size %d, vocabulary %d (frozen, not saved)",
        cache.fingerprint["path"],
        shape.hidden_size,
        shape.vocab_size,
    )
    log.info(
        "head: one Llama-shaped layer whatever the target's family, as both engines build it; "
        "%d heads, %d kv heads, head_dim %d, width %d, rope %s: %s trainable parameters",
        shape.num_attention_heads,
        shape.num_key_value_heads,
        shape.head_dim,
        shape.intermediate_size,
        shape.rope_parameters,
        f"{trainable:,}",
    )
    chats, heldout_chats = chats_of(cache, training), chats_of(cache, heldout)
    log.info(
        "data: %d sequences of %d chats to train on with %s supervised pairs, %d of %d held out, "
        "overlap %d",
        len(training),
        len(chats),
        f"{pairs:,}",
        len(heldout),
        len(heldout_chats),
        len(chats & heldout_chats),
    )
    cost = ""
    if cache.calibration is not None:
        cost = f" ({Cost(**cache.calibration.record['costs']['int8'])})"
    log.info("features: %s%s", cache.manifest["feature_dtype"], cost)
    log.info("replies: %s", describe_replies(cache.manifest.get("replies"), cache.fingerprint))
    log.info(
        "run: %d optimizer steps of about %d tokens over %d process(es) on %s%s",
        total,
        config.batch_tokens,
        accelerator.num_processes,
        accelerator.device,
        f", going on after step {start}" if start else "",
    )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if (devices := torch.accelerator.device_count()) > here:
        log.info(
            "devices: this machine has %d and %d is used. All of them: accelerate launch "
            "--config_file conf/launch/ddp.yaml --num_processes %d -m scripts.train_head ...",
            devices,
            here,
            devices,
        )
    if config.unroll > 1:
        log.info(
            "unroll: each pair is drafted %d steps ahead, from step 2 on the head's own features",
            config.unroll,
        )


def note_start(
    config: TrainConfig, cache: FeatureCache, accelerator: Accelerator, *, start: int, total: int
) -> dict[str, Any]:
    """Write RUN/run.json, and return it. Main process only."""
    file = Path(config.out) / "run.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    before = read_json(file, made_by=MADE_BY) if start and file.is_file() else {}
    this_start = {
        "after_step": start,
        "command": [sys.executable, *sys.argv],
        "launch": accelerator.distributed_type.value,
        "processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "device": str(accelerator.device),
        "git": _git_revision(),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
    }
    record = {
        "format_version": FORMAT_VERSION,
        "id": before.get("id") or uuid.uuid4().hex[:12],
        "settings": asdict(config),
        "steps": total,
        "replies": cache.manifest.get("replies"),
        "starts": [*before.get("starts", []), this_start],
        "result": None,
    }
    write_json(file, record)
    return record


def note_result(run: Path, *, step: int, total: int) -> None:
    """Write into RUN/run.json that the run is over. Main process only."""
    record = read_json(run / "run.json", made_by=MADE_BY)
    why = "all steps" if step == total else "patience"
    if record["result"] != (result := {"step": step, "why": why}):
        write_json(run / "run.json", record | {"result": result})


def _git_revision() -> str | None:
    """The checkout's revision, or None when this is not one."""
    here = Path(__file__).parent
    result = subprocess.run(
        ["git", "-C", str(here), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return result.stdout.strip() or None if result.returncode == 0 else None
