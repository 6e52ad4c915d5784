"""A run that was stopped goes on as if it had not been; another run is refused by name."""

import json
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training import ENVIRONMENT, ROOT, assert_same_run, command, run, small_run, weights
from train.checkpoints import find_checkpoint, load_head
from train.config import TrainConfig
from train.loop import fit


@pytest.fixture
def config(cache_path, tmp_path) -> TrainConfig:
    return small_run(cache_path, tmp_path / "run")


def test_a_killed_run_goes_on_bit_for_bit(config, tmp_path):
    undisturbed = replace(config, save_every=2)
    run(command(undisturbed))
    killed = replace(undisturbed, out=str(tmp_path / "killed"))
    process = subprocess.Popen(
        command(killed), cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL
    )
    first = Path(killed.out) / "steps" / "000002"
    deadline = time.monotonic() + 120
    while not first.is_dir() and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (Path(killed.out) / "steps" / "000008").is_dir(), "it ended before the kill"

    output = run(command(killed))
    assert "going on after step" in output
    assert_same_run(undisturbed.out, killed.out, exactly=True)


def test_a_finished_run_does_nothing(config):
    before = fit(config)
    times = {p: p.stat().st_mtime_ns for p in (Path(config.out) / "steps").rglob("*")}
    assert fit(config) == before
    assert times == {p: p.stat().st_mtime_ns for p in (Path(config.out) / "steps").rglob("*")}


def test_other_settings_into_the_same_run_are_refused_by_name(config):
    fit(config)
    with pytest.raises(ValueError, match=r"(?s)lr: 0.003 there, 0.001 here.*out="):
        fit(replace(config, lr=0.001))
    with pytest.raises(ValueError, match="noise: paper there, none here"):
        fit(replace(config, noise="none"))


def test_old_checkpoints_go_and_the_best_stays(config):
    fit(replace(config, save_every=1, keep=2))
    kept = sorted(int(p.name) for p in (Path(config.out) / "steps").iterdir())
    best = json.loads((Path(config.out) / "best.json").read_text())["step"]
    assert set(kept) == {best, 7, 8}
    assert find_checkpoint(Path(config.out)).name == f"{best:06d}"


def test_a_checkpoint_gives_the_head_and_its_origin(config):
    fit(config)
    head, record = load_head(find_checkpoint(Path(config.out)))
    saved = weights(config.out, record["step"])
    assert all(torch.equal(t, saved[n]) for n, t in head.state_dict().items())
    assert record["settings"]["lr"] == config.lr
    assert record["fingerprint"]["model_type"] == "llama"
    assert record["acceptance"]["tried"][0] > 0
