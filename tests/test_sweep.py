"""Sweeps: one folder for each job, alone and under a launcher."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.training import assert_same_run, command, launch, run, small_run
from train.checkpoints import find_checkpoint, load_head
from train.config import TrainConfig
from train.loop import fit


@pytest.fixture
def config(cache_path, tmp_path) -> TrainConfig:
    return small_run(cache_path, tmp_path / "run")


@pytest.mark.parametrize("launcher", [(), ("ddp.yaml", "--num_processes", "2")], ids=["alone", "2"])
def test_a_sweep_makes_one_folder_per_job(config, tmp_path, launcher):
    """Under a launcher every process runs the same jobs, in one group that outlives each job."""
    arguments = command(config, *(launch(*launcher) if launcher else ()))
    swept = [a for a in arguments if not a.startswith("lr=")]
    run([*swept, "--multirun", "lr=1e-3,3e-3"])
    jobs = sorted(p.name for p in Path(config.out).iterdir() if p.is_dir())
    assert jobs == ["000", "001"]
    for job, lr in zip(jobs, (1e-3, 3e-3), strict=True):
        _, record = load_head(find_checkpoint(Path(config.out) / job))
        assert record["settings"]["lr"] == lr
    single = replace(config, out=str(tmp_path / "single"))
    fit(single)
    assert_same_run(single.out, Path(config.out) / "001")
