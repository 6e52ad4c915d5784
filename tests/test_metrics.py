"""What a run writes of itself, and what trackers get of it."""

import json
import logging
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.training import ENVIRONMENT, ROOT, forget_last, launch, rows, run, small_run
from tests.training import command as training_command
from train.config import TrainConfig
from train.fit.loop import fit


@pytest.fixture
def config(cache_path, tmp_path) -> TrainConfig:
    return small_run(cache_path, tmp_path / "run")


def run_record(config: TrainConfig) -> dict:
    return json.loads((Path(config.out) / "run.json").read_text())


def test_a_run_keeps_its_settings_every_start_and_its_end(config):
    fit(config)
    forget_last(config.out)
    before = run_record(config)["id"]
    run(training_command(config, *launch("ddp.yaml")))
    record = run_record(config)
    assert record["settings"]["lr"] == config.lr and record["steps"] == 8
    assert record["result"] == {"step": 8, "why": "all steps"}
    assert record["id"] == before
    first, second = record["starts"]
    assert (first["after_step"], first["processes"], first["launch"]) == (0, 1, "NO")
    assert (second["after_step"], second["processes"], second["launch"]) == (4, 2, "MULTI_CPU")
    assert {"torch", "transformers", "accelerate"} <= set(first["versions"])


def test_the_time_of_a_run_goes_on_when_it_goes_on(config):
    """Every line has it, and estimates and checkpoints are in it."""
    fit(config)
    forget_last(config.out)
    fit(config)
    lines = [*rows(config.out, "elapsed")]
    assert len(lines) == 8 + 2
    assert all(earlier["elapsed"] < later["elapsed"] for earlier, later in pairwise(lines))
    assert lines[-1]["elapsed"] > sum(row["seconds"] for row in rows(config.out, "seconds"))


def test_a_plain_start_uses_one_device_and_says_how_to_use_all(config, caplog, monkeypatch):
    """On a machine with many GPUs it neither splits the head nor multiplies the batch."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    caplog.set_level(logging.INFO)
    fit(replace(config, max_steps=1))
    assert "over 1 process(es) on cpu" in caplog.text
    assert "this machine has 8 and 1 is used" in caplog.text
    assert "conf/launch/ddp.yaml --num_processes 8" in caplog.text


def test_no_tracker_is_loaded_unless_it_is_asked_for(config):
    code = (
        "import sys\n"
        "from train.config import HeldoutConfig, TrainConfig\n"
        "from train.fit.loop import fit\n"
        f"fit({config!r})\n"
        "assert not {'wandb', 'tensorboard', 'tensorboardX'} & set(sys.modules)\n"
    )
    code = code.replace("import HeldoutConfig", "import HeadConfig, HeldoutConfig, LossConfig")
    code = "from data.config import TargetConfig\n" + code
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert not list(Path(config.out).rglob("events*"))


@pytest.mark.parametrize("tracker", ["wandb", "tensorboard"])
def test_a_tracker_that_is_not_installed_is_named_first(config, monkeypatch, tracker):
    monkeypatch.setitem(sys.modules, tracker, None)  # as if it were not
    with pytest.raises(ValueError, match=rf"pip install -e '\.\[{tracker}\]'"):
        fit(replace(config, tracker=tracker))
    assert not Path(config.out).exists()


def test_wandb_goes_on_with_the_same_run(config, monkeypatch):
    """Offline, without an account."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracked = replace(config, tracker="wandb")
    fit(tracked)
    forget_last(config.out)
    fit(tracked)
    logs = [file.name for file in Path(config.out).rglob("*.wandb")]
    assert logs == [f"run-{run_record(config)['id']}.wandb"] * 2


def test_tensorboard_has_each_step_once_the_settings_and_the_best(config):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracked = replace(config, tracker="tensorboard", save_every=3)
    fit(tracked)
    forget_last(config.out)
    fit(tracked)
    events = EventAccumulator(str(Path(config.out) / "draft-head"))
    events.Reload()
    assert [event.step for event in events.Scalars("smooth_l1")] == list(range(1, 9))
    best = json.loads((Path(config.out) / "best.json").read_text())["acceptance_length"]
    final = events.Scalars("best_acceptance_length")[-1]
    assert final.step == 8 and final.value == pytest.approx(best)
    (settings,) = Path(config.out).rglob("hparams.yml")
    assert "lr: 0.003" in settings.read_text() and "loss.ce_weight: 0.1" in settings.read_text()
