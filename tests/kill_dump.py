"""Kills dumps with SIGKILL at many points, lets them go on, and compares the bytes.

    python -m tests.kill_dump                                40 random points of a tiny dump
    python -m tests.kill_dump --points 4 --renames           and every rename, as the suite does
    python -m tests.kill_dump --target DIR --chats FILE --limit 6 --points 3

Prints a table, and exits with 1 if a dump ended with other bytes than an undisturbed one. Each dump
is a fork of this process, which has imported everything and run nothing yet, or two forks that form
a launch. A victim dies at a random moment, at a random line of the code that writes, or where it
makes a file appear. It goes on with another number of processes, half of the time to die again.
"""

import argparse
import itertools
import mmap
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.config import DatasetConfig, DumpConfig, TargetConfig
from data.dump.run import dump
from tests.tiny import save_tiny_chats, save_tiny_target

WRITERS = (
    "cache/manifest",
    "cache/reader",
    "cache/shards",
    "chats/tokens",
    "dump/plan",
    "dump/run",
    "files",
    "lock",
)  # modules of data/
PATIENCE = 60  # seconds until a process must have noticed that another one died


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


@dataclass(frozen=True)
class Death:
    """Where a dump dies: all its processes at a time (share of an undisturbed run's), or one of
    them before a rename or at a line (their number)."""

    kind: str  # time, rename or line
    at: float
    world: int = 1
    rank: int = 0

    def __str__(self) -> str:
        where = f"{self.at:.0%} of the time" if self.kind == "time" else f"{self.kind} {self.at}"
        whose = f", process {self.rank}" if self.kind != "time" else ", both processes"
        return where + (whose if self.world > 1 else "")


# --- processes ---------------------------------------------------------------------------------


def start(
    config: DumpConfig, *, world: int = 1, prepare: Callable[[int], None], logs: Path | None = None
) -> list[int]:
    """Fork the processes of a dump. Returns their ids.

    prepare: called in each of them, with its rank
    logs:    folder for RANK.log, the error that each ends with
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(world):
        if (pid := os.fork()) == 0:
            launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
            os.environ |= {key: str(value) for key, value in launch.items()} if world > 1 else {}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true"}
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            code = 1
            try:
                prepare(rank)
                dump(config)
                code = 0
            except RuntimeError as error:  # what the outside world did to it
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
                if logs is not None:
                    (logs / f"{rank}.log").write_text(str(error), encoding="utf-8")
            finally:
                os._exit(code)
        pids.append(pid)
    return pids


def finish(pids: list[int], *, within: float = PATIENCE) -> list[int | None]:
    """Wait for processes. Returns their exit codes, None for one that took too long."""
    deadline = time.monotonic() + within
    return [_wait(pid, deadline) for pid in pids]


def _wait(pid: int, deadline: float) -> int | None:
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.002)


def run(config: DumpConfig, *, world: int = 1) -> bool:
    """An undisturbed dump. Returns whether all its processes ended well."""
    return finish(start(config, world=world, prepare=lambda rank: None), within=3600) == [0] * world


# --- deaths ------------------------------------------------------------------------------------


def at_each_rename(act: Callable[[int], None]) -> None:
    """Call `act` with the number of each rename of this process, before it."""
    replace, counter = Path.replace, itertools.count()

    def replace_after(self: Path, target: Path) -> Path:
        act(next(counter))
        return replace(self, target)

    Path.replace = replace_after  # type: ignore[method-assign, assignment]


def at_each_line(act: Callable[[int], None]) -> None:
    """Call `act` with the number of each line of WRITERS that a thread of this process comes to."""
    counter = itertools.count()
    folder = Path(sys.modules["data"].__file__ or "").parent
    files = {str(folder / f"{name}.py") for name in WRITERS}

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            act(next(counter))
        return trace

    threading.settrace(trace)
    sys.settrace(trace)


EACH = {"rename": at_each_rename, "line": at_each_line}


def kill(config: DumpConfig, death: Death, *, seconds: float) -> bool:
    """Run a dump until it dies, if it does. Returns whether no process had to be helped to end.

    seconds: what an undisturbed dump takes
    """

    def prepare(rank: int) -> None:
        def die(number: int) -> None:
            if number == death.at:
                os.kill(os.getpid(), signal.SIGKILL)

        if death.kind in EACH and rank == death.rank:
            EACH[death.kind](die)

    pids = start(config, world=death.world, prepare=prepare)
    if death.kind == "time":
        time.sleep(death.at * seconds)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    return None not in finish(pids, within=PATIENCE + 10 * seconds)


@dataclass(frozen=True)
class Course:
    """What an undisturbed dump of `world` processes goes through."""

    seconds: float
    renames: int  # of the first process
    lines: int  # of the first process

    @classmethod
    def measure(cls, config: DumpConfig, *, world: int) -> "Course":
        counts = mmap.mmap(-1, 16)  # shared with the forks

        def prepare(rank: int) -> None:
            def count(place: int) -> Callable[[int], None]:
                return lambda n: counts.__setitem__(
                    slice(place, place + 8), (n + 1).to_bytes(8, "little")
                )

            if rank == 0:
                at_each_rename(count(0))
                at_each_line(count(8))

        began = time.monotonic()
        finish(start(config, world=world, prepare=lambda rank: None), within=3600)
        seconds = time.monotonic() - began
        shutil.rmtree(config.out)
        finish(start(config, world=world, prepare=prepare), within=3600)
        shutil.rmtree(config.out)
        renames, lines = (int.from_bytes(counts[at : at + 8], "little") for at in (0, 8))
        return cls(seconds, renames, lines)

    def death(self, kind: str, world: int, draw: random.Random) -> Death:
        """A random one."""
        if kind == "time":
            return Death(kind, draw.random(), world)
        return Death(kind, draw.randrange(self.lines), world, rank=draw.randrange(world))


# --- the table ---------------------------------------------------------------------------------


def rows(make: Callable[[Path], DumpConfig], folder: Path, arguments: Any) -> Iterator[list[str]]:
    """Death, what it left, who went on, and the result: one line for each dump that died."""
    run(make(folder / "undisturbed"))
    expected = contents(folder / "undisturbed")
    worlds = (1, 2) if arguments.two else (1,)
    courses = {world: Course.measure(make(folder / "course"), world=world) for world in worlds}
    draw = random.Random(arguments.seed)
    kinds = itertools.cycle(("time", "line"))
    deaths = [
        courses[world].death(next(kinds), world, draw)
        for world in (draw.choice(worlds) for _ in range(arguments.points))
    ]
    renames = range(courses[1].renames if arguments.renames else 0)
    for number, death in enumerate([*(Death("rename", n) for n in renames), *deaths]):
        config = make(folder / str(number))
        ended = kill(config, death, seconds=courses[death.world].seconds)
        left = _left(Path(config.out), len(expected))
        world = draw.choice(worlds) if death.kind == "rename" else worlds[-1] + 1 - death.world
        went_on = f"{world}"
        if draw.random() < 0.5 and death.kind != "rename":
            second = courses[world].death(draw.choice(("time", "line")), world, draw)
            ended &= kill(config, second, seconds=courses[world].seconds)
            world = draw.choice(worlds)
            went_on = f"{went_on} (died at {second}), {world}"
        ended &= run(config, world=world)
        same = contents(Path(config.out)) == expected
        yield [
            str(death),
            left,
            went_on,
            "same bytes" if same and ended else "HUNG" if same else "OTHER BYTES",
        ]
        shutil.rmtree(config.out)


def _left(out: Path, count: int) -> str:
    if not out.exists():
        return "nothing"
    files = [file for file in contents(out) if file != ".lock"]
    unfinished = [file for file in files if "tmp" in file]
    whole = f"{len(files) - len(unfinished)} of {count - 1} files"
    return ", and ".join([whole, *unfinished])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", type=Path)
    parser.add_argument("--chats", type=Path)
    parser.add_argument("--limit", type=int, help="chats used")
    parser.add_argument("--points", type=int, default=40)
    parser.add_argument("--renames", action="store_true", help="also die before each rename")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", dest="two", action="store_false", help="no launches of two")
    arguments = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        target = arguments.target or save_tiny_target(folder / "target")
        chats = arguments.chats or save_tiny_chats(folder / "chats.json")

        def make(out: Path) -> DumpConfig:
            dataset = DatasetConfig(path=str(chats), limit=arguments.limit)
            return small_dump(str(target), str(chats), out, dataset=dataset)

        print("| died at | left | went on with | result |\n|---|---|---|---|", flush=True)
        for row in rows(make, folder, arguments):
            failed += row[-1] != "same bytes"
            print(f"| {' | '.join(row)} |", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
