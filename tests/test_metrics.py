"""What a run writes of itself, and what trackers get."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from tests.training import small_run
from train.config import TrainConfig
from train.loop import fit


@pytest.fixture
def config(cache_path, tmp_path) -> TrainConfig:
    return small_run(cache_path, tmp_path / "run")


@pytest.mark.parametrize(("tracker", "files"), [("tensorboard", "events*"), ("wandb", "*.wandb")])
def test_a_tracker_writes_into_the_run_or_says_what_to_install(config, monkeypatch, tracker, files):
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracked = replace(config, tracker=tracker)
    if importlib.util.find_spec(tracker) is None:
        with pytest.raises(ValueError, match=rf"pip install -e '\.\[{tracker}\]'"):
            fit(tracked)
        assert not Path(config.out).exists()
    else:
        fit(tracked)
        assert list(Path(config.out).rglob(files))
