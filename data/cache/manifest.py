"""The manifest of a cache makes it valid. It follows from the plan and the shards' records."""

import logging
from pathlib import Path
from typing import Any

from data.cache.reader import FORMAT_VERSION, calibration_record, shard_record
from data.dump.plan import Plan
from data.files import json_bytes, write_json, writing

log = logging.getLogger(__name__)


def write_manifest(out: Path, plan: Plan) -> None:
    """Write what makes the cache valid."""
    missing = [str(n) for n, record in enumerate(shard_records(out, plan)) if record is None]
    if missing:
        raise RuntimeError(
            f"Shards {', '.join(missing)} of {out} are gone. Run the same command again: it does "
            "only them."
        )
    with writing(out / "manifest.json"):
        write_json(out / "manifest.json", make_manifest(out, plan))
    log.info("%s is finished. Next: python -m scripts.train_head features=%s", out, out)


def make_manifest(out: Path, plan: Plan) -> dict[str, Any]:
    """What manifest.json has to say. Nothing in it depends on time or on who did the work."""
    return {
        "format_version": FORMAT_VERSION,
        "fingerprint": plan.fingerprint,
        "settings": plan.settings,
        "replies": plan.replies,
        "hidden_size": plan.hidden_size,
        "feature_dtype": plan.feature_dtype,
        "calibration": calibration_record(out) if plan.feature_dtype == "int8" else None,
        "num_sequences": len(plan.sequence_ids),
        "num_tokens": plan.num_tokens,
        "num_supervised": plan.num_supervised,
        "origin": {"command": "python -m scripts.dump_features", "versions": plan.versions},
        "shards": shard_records(out, plan),
    }


def manifest_is(out: Path, plan: Plan) -> bool:
    """Whether the manifest is there and says what plan and shards say."""
    file = out / "manifest.json"
    return file.is_file() and file.read_bytes() == json_bytes(make_manifest(out, plan))


def shard_records(out: Path, plan: Plan) -> list[dict[str, Any] | None]:
    """The record of each shard, None for one that has to be done (again)."""
    return [shard_record(out, index, checksum=False) for index in range(len(plan.shards))]


def unfinished(out: Path, plan: Plan) -> list[int]:
    """The shards that have to be done (again)."""
    return [index for index, record in enumerate(shard_records(out, plan)) if record is None]


def bytes_there(out: Path, records: list[dict[str, Any] | None]) -> int:
    """Bytes of what is finished of a cache."""
    names = ("plan.json", "tokens.safetensors")
    files = [out / name for name in names if (out / name).is_file()]
    shards = sum(record["bytes"] for record in records if record is not None)
    return shards + sum(file.stat().st_size for file in files)
