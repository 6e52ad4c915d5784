"""Keeps a second process out of what this one writes."""

import errno
import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.files import writing

log = logging.getLogger(__name__)

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def locked(file: Path, *, busy: str) -> Iterator[None]:
    """Hold `file`, an empty one; the kernel lets go of it when this process dies.

    A file system without locks, as some network file systems are mounted, is warned of.

    busy: the message of the RuntimeError that is raised if another process holds the file
    """
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.open("a")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(busy) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise RuntimeError(f"Cannot lock {file}: {error}.") from error
            log.warning(
                "warning: the file system of %s has no locks (%s), so that nothing keeps a second "
                "process from writing there. Start only one.",
                file.parent,
                error.strerror,
            )
        yield
