"""Kills a dump at every point where it makes a file appear. Run by tests/test_dump.py.

    python -m tests.kill_dump TARGET CHATS FOLDER

Each victim is a fork of this process, which has imported everything but run nothing yet: victim
number k dies just before its k-th rename, with the file written under its temporary name, and
leaves its folder in FOLDER/k. Ends when a victim survives.
"""

import itertools
import os
import signal
import sys
from pathlib import Path

from data.config import DatasetConfig, DumpConfig, TargetConfig
from data.dump import dump


def small_dump(target_path: str, chats_path: str, out: Path, **changes) -> DumpConfig:
    values = {
        "target": TargetConfig(path=target_path, device="cpu"),
        "dataset": DatasetConfig(path=chats_path),
        "out": str(out),
        "max_length": 256,
        "shard_tokens": 1600,
        "batch_tokens": 512,
    }
    return DumpConfig(**{**values, **changes})


def contents(folder: Path) -> dict[str, bytes]:
    """What every file of a folder holds."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def die_at_rename(number: int) -> None:
    replace, counter = Path.replace, itertools.count()

    def replace_or_die(self: Path, target: Path) -> Path:
        if next(counter) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(self, target)

    Path.replace = replace_or_die  # type: ignore[method-assign, assignment]


def main(target: str, chats: str, folder: str) -> None:
    for number in itertools.count():
        victim = os.fork()
        if victim == 0:
            die_at_rename(number)
            dump(small_dump(target, chats, Path(folder) / str(number)))
            os._exit(0)
        _, status = os.waitpid(victim, 0)
        if not os.WIFSIGNALED(status):
            sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(*sys.argv[1:])
