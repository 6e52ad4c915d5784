"""Kills a training at every point where it makes a file appear or go. Run by tests/test_resume.py.

    python -m tests.kill_train CACHE FOLDER

Each victim is a fork of this process, which has imported everything but run nothing yet: victim
number k dies just before its k-th rename or removal of a folder, and leaves its run in FOLDER/k.
Ends when a victim survives.
"""

import itertools
import os
import shutil
import signal
import sys
from pathlib import Path

from tests.training import small_run
from train.config import TrainConfig
from train.fit.loop import fit


def short_run(cache: Path, out: Path) -> TrainConfig:
    """Three steps, each with an estimate and a checkpoint, of which only the newest one stays."""
    return small_run(cache, out, max_steps=3, save_every=1, keep=1)


def die_at_event(number: int) -> None:
    replace, rmtree, counter = Path.replace, shutil.rmtree, itertools.count()

    def replace_or_die(self: Path, target: Path) -> Path:
        if next(counter) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(self, target)

    def remove_or_die(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors and next(counter) == number:
            next(Path(path).iterdir()).unlink()  # in the middle of it
            os.kill(os.getpid(), signal.SIGKILL)
        rmtree(path, ignore_errors=ignore_errors)

    Path.replace = replace_or_die  # type: ignore[method-assign, assignment]
    shutil.rmtree = remove_or_die  # type: ignore[assignment]


def main(cache: str, folder: str) -> None:
    for number in itertools.count():
        victim = os.fork()
        if victim == 0:
            die_at_event(number)
            fit(short_run(Path(cache), Path(folder) / str(number)))
            os._exit(0)
        _, status = os.waitpid(victim, 0)
        if not os.WIFSIGNALED(status):
            sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(*sys.argv[1:])
