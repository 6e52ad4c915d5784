import gc
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from data.targets.private_folder import PrivateFolder


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """Folders of the test's own for the memory and for the disk."""
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    monkeypatch.setattr("data.targets.private_folder.MEMORY", memory)
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    return memory, disk


def test_it_goes_with_its_object(places):
    folder = PrivateFolder(1000)
    path = folder.path
    (path / "file").write_text("states")
    assert path.parent == places[0]
    assert path.stat().st_mode & 0o077 == 0  # nobody else's business
    del folder
    gc.collect()
    assert not path.exists()


def test_it_goes_with_a_process_that_fails(places):
    code = "from data.targets.private_folder import *; folder = PrivateFolder(10**18); 1 / 0"
    environment = {**os.environ, "TMPDIR": str(places[1])}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert b"ZeroDivisionError" in result.stderr
    assert list(places[1].iterdir()) == []


def test_what_does_not_fit_into_memory_goes_to_the_disk(places):
    assert PrivateFolder(10**18).path.parent == places[1]


def test_the_folder_of_a_killed_process_is_removed_by_the_next_and_that_of_a_live_one_kept(places):
    code = "from data.targets.private_folder import *; folder = PrivateFolder(10**18)"
    code += "; print(folder.path.name, flush=True); input()"
    environment = {**os.environ, "TMPDIR": str(places[1])}
    killed, alive = (
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    )  # fmt: skip
    names = [process.stdout.readline().strip() for process in (killed, alive)]
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert all((places[1] / name).is_dir() for name in names)

    mine = PrivateFolder(10**18)
    assert {path.name for path in places[1].iterdir()} == {names[1], mine.path.name}
    alive.communicate("\n")
