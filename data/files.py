"""Files that appear whole or not at all."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

# What only writing can meet: no space, quota, file too large, mounted read-only.
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@contextmanager
def writing(path: Path, *, also_reads: bool = False) -> Iterator[None]:
    """Turn the system's refusal to write `path` into a RuntimeError that says what to do.

    also_reads: the block reads other files too, whose errors pass
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        if also_reads and getattr(error, "errno", None) not in CANNOT_WRITE:
            raise
        raise RuntimeError(
            f"Cannot write {path}: {error}. Look at free space, quota, permissions, and whether "
            "the folder is still there; then run the same command again. What was written before "
            "is whole, and it goes on from there."
        ) from error


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path, and rename it to `path` if the block succeeds."""
    tmp = path.with_name(f"{path.name}.tmp")
    try:
        yield tmp
        _settle(tmp)
        tmp.replace(path)
        _fsync_folder(path.parent)
    finally:
        tmp.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to `path` if the block succeeds.

    A folder that already lies at `path` is replaced, and goes only when the new one is in place.
    """
    tmp, old = path.with_name(f"{path.name}.tmp"), path.with_name(f"{path.name}.old")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    try:
        yield tmp
        for file in tmp.rglob("*"):
            if file.is_file():
                _settle(file)
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.replace(old)
        tmp.replace(path)
        _fsync_folder(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON by rename."""
    with atomic_write(path) as tmp:
        tmp.write_bytes(json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """What `write_json` writes."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def read_json(path: Path, *, made_by: str) -> Any:
    """Read a JSON file. Raises FileNotFoundError or ValueError that name the command to run."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist. It is written by `{made_by}`.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or not even text
        raise ValueError(f"{path} is not valid JSON ({error}). Run `{made_by}` again.") from error


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _settle(file: Path) -> None:
    """Bring a file's bytes to the disk. safetensors makes files that only their owner can read."""
    file.chmod(0o644)
    with file.open("rb") as f:
        os.fsync(f.fileno())


def _fsync_folder(folder: Path) -> None:
    # The rename itself is durable only once the folder that holds the name is.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_space(folder: Path) -> tuple[int, Path]:
    """Free bytes where a folder is or will be, and the nearest folder that is there already."""
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    return shutil.disk_usage(existing).free, existing


def readable_size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} GB"
