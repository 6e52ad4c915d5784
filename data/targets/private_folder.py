"""A folder for files that pass between processes: in memory if there is room, never left behind."""

import fcntl
import logging
import os
import shutil
import tempfile
import weakref
from pathlib import Path

log = logging.getLogger(__name__)

PREFIX = "eagle-states-"
MEMORY = Path("/dev/shm")


class PrivateFolder:
    """Exists as long as this object, at most as long as the process.

    A process that is killed cannot clear up: the next one removes the folders that nobody holds.
    """

    path: Path

    def __init__(self, num_bytes: int) -> None:
        """num_bytes: what the files in it may take together."""
        parent = Path(tempfile.gettempdir())
        # Containers often have no more than 64 MB of it.
        if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= num_bytes:
            parent = MEMORY
        for orphan in parent.glob(f"{PREFIX}*"):
            _remove_unless_held(orphan)
        new = Path(tempfile.mkdtemp(dir=parent))  # of another name until it is held
        held = _hold(new)
        self.path = new.rename(new.with_name(PREFIX + new.name))
        self.close = weakref.finalize(self, _remove, self.path, held)


def _hold(folder: Path) -> int:
    """Lock a folder; the kernel lets go of it when this process dies. Raises OSError if held."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_unless_held(folder: Path) -> None:
    try:
        held = _hold(folder)
    except OSError:  # held, another user's, or gone
        return
    _remove(folder, held)


def _remove(folder: Path, held: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(held)
