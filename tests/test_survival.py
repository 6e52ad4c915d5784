"""What the world does to a dump: kills, full disks, lost folders, signals, a process that dies."""

import errno
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from data.config import DumpConfig
from data.dump.run import dump
from tests.full_disk import NOT_PERMITTED, limit_files
from tests.kill_dump import contents, small_dump
from tests.tiny import save_tiny_chats

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


@pytest.fixture
def make_config(target_path, chats_path):
    def make(out: Path, **changes):
        return small_dump(str(target_path), str(chats_path), out, **changes)

    return make


@pytest.fixture(scope="module")
def expected(target_path, chats_path, tmp_path_factory) -> dict[str, bytes]:
    """What an undisturbed dump writes."""
    out = tmp_path_factory.mktemp("undisturbed") / "cache"
    return contents(dump(small_dump(str(target_path), str(chats_path), out)))


def module(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


# --- kills -------------------------------------------------------------------------------------


def test_a_dump_killed_anywhere_ends_with_the_same_bytes():
    """At every rename, and a few of the places that `python -m tests.kill_dump` draws."""
    result = module("tests.kill_dump", "--points", "4", "--renames")
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line for line in result.stdout.splitlines() if line.startswith("| ")][1:]
    assert sum(row.startswith("| rename") for row in rows) == 2 + 2 * 3 + 1
    assert len(rows) == 9 + 4
    assert all(row.endswith("| same bytes |") for row in rows)


# --- disks -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def said() -> Callable[[str], list[str]]:
    """What dumps said onto each kind of full disk of `python -m tests.full_disk`."""
    result = module("tests.full_disk")
    assert result.returncode == 0, result.stdout + result.stderr

    def of_kind(kind: str) -> list[str]:
        parts = (line.partition(": ") for line in result.stdout.splitlines())
        return [line for name, _, line in parts if name == kind]

    return of_kind


def test_a_file_that_cannot_be_written_is_named_and_the_dump_goes_on_later(said):
    lines = said("rlimit")
    for name in ("tokens.safetensors", "shards/00000.safetensors", "shards/00001.safetensors"):
        message = f"/{name}: Error while serializing: I/O error: File too large"
        assert any(message in line for line in lines), name


def test_a_disk_that_fills_up_anywhere_leaves_what_a_dump_goes_on_from(said):
    lines = said("tmpfs")
    if lines == [NOT_PERMITTED]:
        pytest.skip(NOT_PERMITTED)
    assert all(line.startswith("Cannot write /disk/cache") for line in lines)
    for name in ("", "/tokens.safetensors", "/plan.json", "/shards/00000.safetensors"):
        assert any(line.startswith(f"Cannot write /disk/cache{name}: ") for line in lines), name
    half = "'cache/plan.json', 'cache/shards/00000.safetensors', 'cache/tokens.safetensors']"
    assert any(half in line for line in lines)  # no room for the record of a whole shard
    assert lines[-1].startswith("Cannot write /disk/cache/.lock: [Errno 30] Read-only file system")


def test_a_launch_ends_when_one_of_its_processes_fails_and_names_it(said):
    first, second, seconds = said("launch")
    assert first.startswith("process 0: Process 1 of 2 has stopped (this is process 0).")
    assert second.startswith("process 1: Cannot write /launch/shards/00001.safetensors: ")
    assert float(seconds.removeprefix("seconds: ")) < 30


def test_the_command_ends_with_one_message_on_a_full_disk(target_path, chats_path, tmp_path):
    command = [sys.executable, "-m", "scripts.dump_features", f"target={target_path}"]
    command += [f"dataset={chats_path}", f"out={tmp_path / 'cache'}", "max_length=256"]
    result = subprocess.run(
        command,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: limit_files(50_000)(0),
    )
    assert result.returncode == 1
    assert "error: Cannot write " in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "cache" / "manifest.json").exists()


def test_a_folder_that_cannot_be_made_is_named(make_config):
    with pytest.raises(RuntimeError, match=r"Cannot write /proc/cache/.lock: .*No such file"):
        dump(make_config(Path("/proc/cache")))


@pytest.mark.parametrize("number", [0, 2, 5])
def test_a_folder_deleted_under_the_dump_is_an_error_and_starts_anew(
    number, make_config, expected, tmp_path, monkeypatch
):
    out = tmp_path / "cache"
    replace, renames = Path.replace, []

    def delete_first(self: Path, target: Path) -> Path:
        renames.append(target)
        if len(renames) == number + 1:
            shutil.rmtree(out)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", delete_first)
    with pytest.raises(RuntimeError, match=rf"Cannot write {out}/.*the folder is still there"):
        dump(make_config(out))
    assert not (out / "manifest.json").exists()
    dump(make_config(out))
    assert contents(out) == expected


def test_shards_deleted_under_the_dump_are_missed_before_the_manifest_is_written(
    make_config, expected, tmp_path, monkeypatch
):
    out = tmp_path / "cache"
    replace = Path.replace

    def delete_before_the_last(self: Path, target: Path) -> Path:
        if target.name == "00002.json":
            (out / "shards" / "00000.safetensors").unlink()
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", delete_before_the_last)
    with pytest.raises(RuntimeError, match=r"Shards 0 of .* are gone"):
        dump(make_config(out))
    monkeypatch.undo()
    dump(make_config(out))
    assert contents(out) == expected


# --- locks -------------------------------------------------------------------------------------


def test_a_second_dump_into_the_same_folder_is_refused(make_config, expected, tmp_path):
    out = tmp_path / "cache"
    out.mkdir()
    with (out / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match=r"Another dump is writing into"):
            dump(make_config(out))
    dump(make_config(out))
    assert contents(out) == expected


def refuse_locks(monkeypatch, number: int) -> None:
    def flock(file, operation) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_warned_of(
    number, make_config, expected, tmp_path, monkeypatch, caplog
):
    refuse_locks(monkeypatch, number)
    out = dump(make_config(tmp_path / "cache"))
    assert f"the file system of {out} has no locks ({os.strerror(number)})" in caplog.text
    assert contents(out) == expected


def test_a_lock_that_fails_otherwise_stops_the_dump(make_config, tmp_path, monkeypatch):
    refuse_locks(monkeypatch, errno.EIO)
    with pytest.raises(RuntimeError, match=r"Cannot lock .*cache/.lock: .*Input/output error"):
        dump(make_config(tmp_path / "cache"))


# --- signals -----------------------------------------------------------------------------------


@pytest.fixture
def many(target_path, tmp_path) -> DumpConfig:
    """A dump of many shards."""
    chats = save_tiny_chats(tmp_path / "chats.json", 200)
    out = tmp_path / "cache"
    return small_dump(str(target_path), str(chats), out, shard_tokens=800, batch_tokens=128)


def finished(config: DumpConfig) -> int:
    return len(list(Path(config.out).glob("shards/*.json")))


def test_an_interrupted_command_says_how_to_go_on_and_does(many, caplog):
    command = [sys.executable, "-m", "scripts.dump_features", f"target={many.target.path}"]
    command += [f"dataset={many.dataset.path}", f"out={many.out}", "max_length=256"]
    command += ["shard_tokens=800", "batch_tokens=128", "target.device=cpu"]
    process = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while finished(many) == 0 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert printed.splitlines()[-1] == "stopped: the same command goes on from here"
    assert "Traceback" not in errors
    done = finished(many)
    with caplog.at_level(logging.INFO):
        out = dump(many)
    assert f"resume: {done} of " in caplog.text
    assert (out / "manifest.json").exists()


def test_sigterm_stops_a_dump_as_an_interrupt_does(many, caplog):
    def terminate() -> None:
        while finished(many) == 0:
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    killer = threading.Thread(target=terminate)
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        dump(many)
    killer.join()
    assert "stopped: the same command goes on from here" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is before
    assert not (Path(many.out) / "manifest.json").exists()
