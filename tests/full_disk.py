"""Dumps onto full disks: each ends with one message, and goes on when there is room.

    python -m tests.full_disk

Three kinds: files that may not be larger than so much; two processes of which the second cannot
write; a file system that grows page by page, where mounting is permitted. Prints for each dump what
it said and what it left, and fails if a dump does anything else than that.
"""

import resource
import shutil
import subprocess
import tempfile
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

from data.config import DumpConfig
from tests.kill_dump import contents, finish, run, small_dump, start
from tests.tiny import save_tiny_chats, save_tiny_target

NOT_PERMITTED = "mounting a file system is not permitted here"
PAGE = 4096


def mount(*arguments: str, check: bool = True) -> bool:
    result = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    assert not (check and result.returncode), result.stderr
    return result.returncode == 0


def seems_empty(rank: int) -> None:
    """Somebody else fills the disk after the dump has asked how much is free."""
    usage = namedtuple("usage", "total used free")(10**12, 0, 10**12)
    shutil.disk_usage = lambda path: usage  # type: ignore[assignment]


def tmpfs(make: Callable[[Path], DumpConfig], folder: Path) -> Iterator[str]:
    """The same dump again and again, on a disk with one more page each time."""
    disk = folder / "disk"
    disk.mkdir()
    if not mount("-t", "tmpfs", "-o", f"size={PAGE}", "none", str(disk), check=False):
        yield NOT_PERMITTED
        return
    config = make(disk / "cache")
    try:
        for pages in range(2, 1000):
            mount("-o", f"remount,size={pages * PAGE}", str(disk))
            [code] = finish(start(config, prepare=seems_empty, logs=folder))
            if code == 0:
                break
            assert code == 1, code
            yield f"{(folder / '0.log').read_text()} Left: {sorted(contents(disk))}"
        assert contents(disk / "cache") == contents(folder / "undisturbed")
        (disk / "cache" / "manifest.json").unlink()
        mount("-o", "remount,ro", str(disk))
        assert finish(start(config, prepare=seems_empty, logs=folder)) == [1]
        yield (folder / "0.log").read_text()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def limit_files(size: int) -> Callable[[int], None]:
    return lambda rank: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def rlimit(make: Callable[[Path], DumpConfig], folder: Path) -> Iterator[str]:
    """A limit below the size of each file that a dump writes."""
    sizes = {name: len(content) for name, content in contents(folder / "undisturbed").items()}
    for size in sorted(set(sizes.values()) - {0}):
        config = make(folder / f"limit{size}")
        assert finish(start(config, prepare=limit_files(size - 1), logs=folder)) == [1]
        assert not (Path(config.out) / "manifest.json").exists()
        yield f"{(folder / '0.log').read_text()} Left: {sorted(contents(Path(config.out)))}"
        assert run(config)
        assert contents(Path(config.out)) == contents(folder / "undisturbed")


def launch(make: Callable[[Path], DumpConfig], folder: Path) -> Iterator[str]:
    config = make(folder / "launch")

    def prepare(rank: int) -> None:
        if rank == 1:
            limit_files(2000)(rank)

    began = time.monotonic()
    assert finish(start(config, world=2, prepare=prepare, logs=folder)) == [1, 1]
    assert not (Path(config.out) / "manifest.json").exists()
    for rank in range(2):
        yield f"process {rank}: {(folder / f'{rank}.log').read_text()}"
    yield f"seconds: {time.monotonic() - began:.0f}"
    assert run(config, world=2)
    assert contents(Path(config.out)) == contents(folder / "undisturbed")


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        target = save_tiny_target(folder / "target")
        chats = save_tiny_chats(folder / "chats.json", 8)

        def make(out: Path) -> DumpConfig:
            return small_dump(str(target), str(chats), out, shard_tokens=400)

        assert run(make(folder / "undisturbed"))
        for kind in (rlimit, launch, tmpfs):
            for line in kind(make, folder):
                print(f"{kind.__name__}: {line.replace(temporary, '')}", flush=True)


if __name__ == "__main__":
    main()
