"""Whose replies a chat file holds: the record beside it, and what every later artifact says.

CHATS.origin.json is written by `python -m scripts.regenerate_replies`. A file without one holds the
replies of whoever wrote it, which nobody can know from the file.
"""

import importlib.metadata
import logging
from pathlib import Path
from typing import Any

from data.files import read_json, sha256, write_json
from data.targets.fingerprint import fingerprint_differences

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
MADE_BY = "python -m scripts.regenerate_replies"
UNKNOWN = {"written_by": "unknown"}


def origin_path(chats: Path) -> Path:
    return chats.with_name(f"{chats.name}.origin.json")


def write_origin(
    chats: Path,
    *,
    fingerprint: dict[str, str],
    settings: dict[str, Any],
    endpoint: str | None,
    counts: dict[str, Any],
) -> None:
    """Write the record that makes a regenerated chat file valid."""
    record = {
        "format_version": FORMAT_VERSION,
        "written_by": "endpoint" if endpoint else "target",
        "fingerprint": fingerprint,
        "endpoint": endpoint,
        "settings": settings,
        "counts": counts,
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "sha256": sha256(chats),
    }
    write_json(origin_path(chats), record)


def read_origin(chats: Path) -> dict[str, Any] | None:
    """The record beside a chat file, if there is one. Raises ValueError for another format."""
    file = origin_path(chats)
    if not file.is_file():
        return None
    record = read_json(file, made_by=MADE_BY)
    if not isinstance(record, dict) or record.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{file} is no record of regenerated replies that this version reads (format_version "
            f"{FORMAT_VERSION}). Move it away if it belongs to something else; else regenerate "
            f"into another file: `{MADE_BY}`."
        )
    return record


def replies_of(path: str, *, checksum: str | None) -> dict[str, Any]:
    """Whose replies the chats at `path` hold, as plan.json and manifest.json record it.

    checksum: SHA-256 of the file; a record of another content is warned of and tells nothing
    """
    chats = Path(path).expanduser()
    record = read_origin(chats) if chats.is_file() else None
    if record is None:
        return UNKNOWN
    if record["sha256"] != checksum:
        log.warning(
            "warning: %s has changed since %s was written (sha256 %s there, %s now): whose replies "
            "it holds is unknown.",
            chats,
            origin_path(chats).name,
            record["sha256"][:16],
            str(checksum)[:16],
        )
        return UNKNOWN
    settings = record["settings"]
    names = ("model", "temperature", "top_p", "seed", "max_new_tokens", "max_length")
    return {
        "written_by": record["written_by"],
        "endpoint": record["endpoint"],
        **{name: settings[name] for name in names},
        "fingerprint": record["fingerprint"],
        "source_sha256": settings.get("dataset.sha256"),
    }


def describe_replies(replies: dict[str, Any] | None, fingerprint: dict[str, str]) -> str:
    """In a line, whose replies they are; `fingerprint` is that of the target of the features."""
    if not replies or replies["written_by"] == "unknown":
        return "as in the file"
    theirs = replies["fingerprint"]
    whose = "another target" if fingerprint_differences(fingerprint, theirs) else "the target"
    where = f" as {replies['model']} at {replies['endpoint']}" if replies["endpoint"] else ""
    return (
        f"written by {whose}{where} (fingerprint {theirs['weights']}, "
        f"temperature {replies['temperature']:g})"
    )


def log_replies(replies: dict[str, Any], fingerprint: dict[str, str]) -> None:
    """Say whose replies they are, and what differs if it is another target than the dump's."""
    log.info("replies: %s", describe_replies(replies, fingerprint))
    for line in fingerprint_differences(fingerprint, replies.get("fingerprint", fingerprint)):
        log.warning(
            "warning: the replies were written by another target than this one (there: %s): %s",
            replies["fingerprint"]["path"],
            line,
        )
