"""What the files of a cache say of each other: checksums, and JSON that follows from the rest."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.files import json_bytes, sha256

Record = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    file: str  # relative to the cache
    found: str
    expected: str


def state_of(path: Path) -> Record:
    """Size and checksum of a file; empty if there is none."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)} if path.is_file() else {}


def unlike(name: str, state: Record, claims: list[Record]) -> Problem | None:
    """What is wrong with a file of which none of the `claims` is true."""
    if any(_is_true(claim, state) for claim in claims):
        return None
    if not claims:
        where = "a checksum of it, in its record or in the manifest"
        return Problem(name, f"{state['bytes']} bytes" if state else "no file", where)
    key = "sha256" if state and claims[0].get("bytes") == state["bytes"] else "bytes"
    key = key if key in claims[0] else "sha256"
    found = f"{key} {str(state[key])[:16]}" if state else "no file"
    return Problem(name, found, f"{key} {str(claims[0].get(key))[:16]}")


def _is_true(claim: Record, state: Record) -> bool:
    keys = {"sha256"} | ({"bytes"} & claim.keys())
    return bool(state) and all(claim.get(key) == state[key] for key in keys)


def read_claim(file: Path) -> Record | None:
    """What a JSON file says; None if it is absent or damaged."""
    try:
        value = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def shard_entry(manifest: Record | None, index: int) -> Record | None:
    """What the manifest says of a shard; None if it says nothing."""
    entries = (manifest or {}).get("shards")
    if not isinstance(entries, list) or index >= len(entries):
        return None
    return entries[index] if isinstance(entries[index], dict) else None


def json_problems(file: Path, expected: Record, *, name: str = "") -> list[Problem]:
    """None or one: the first place where a JSON file differs from what it has to say."""
    name = name or file.name
    if not file.is_file():
        return [Problem(name, "no file", "one")]
    if file.read_bytes() == json_bytes(expected):
        return []
    if (there := read_claim(file)) is None:
        return [Problem(name, "no JSON", "JSON")]
    return [Problem(name, *_first_difference(there, expected))]


def _first_difference(there: Any, expected: Any, at: str = "") -> tuple[str, str]:
    """(found, expected) of the first value that differs between two JSON values."""
    if isinstance(there, dict) and isinstance(expected, dict):
        keys: Any = {**expected, **there}
    elif isinstance(there, list) and isinstance(expected, list) and len(there) == len(expected):
        keys = range(len(expected))
        there, expected = dict(enumerate(there)), dict(enumerate(expected))
    else:
        return f"{at} {_short(there)}", _short(expected)
    for key in keys:
        if there.get(key, "absent") != expected.get(key, "absent"):
            inner = f"{at}.{key}" if at else str(key)
            return _first_difference(there.get(key, "absent"), expected.get(key, "absent"), inner)
    return "the same values written in another way", "as the dump writes them"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 70 else f"{text[:67]}..."


def disagreement(file: str) -> Problem:
    """Of two records with the right checksum, it cannot be said which one is damaged."""
    return Problem(file, "not what the manifest says", "the same, and what the shard holds")
