"""Sweeps: one folder for each run, alone and under a launcher, and a table at the end."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.training import assert_same_run, command, launch, run, small_run
from train.config import TrainConfig
from train.fit.checkpoints import find_checkpoint, load_head
from train.fit.loop import fit


@pytest.fixture
def config(cache_path, tmp_path) -> TrainConfig:
    return small_run(cache_path, tmp_path / "run")


def sweep(config: TrainConfig, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    """Run a sweep over lr, and return what it printed."""
    start = command(config, *(launch(*launcher) if launcher else ()))
    return run([*(a for a in start if not a.startswith("lr=")), "--multirun", *arguments])


@pytest.mark.parametrize("launcher", [(), ("ddp.yaml", "--num_processes", "2")], ids=["alone", "2"])
def test_a_sweep_makes_one_folder_per_run_and_ends_in_a_table(config, tmp_path, launcher):
    """Under a launcher every process has the same runs, in one group that outlives each of them.

    A run whose loss is not finite is told so, and does not keep the others from running.
    """
    output = sweep(config, "lr=1e30,1e-3,3e-3", launcher=launcher)
    runs = sorted(p.name for p in Path(config.out).iterdir() if p.is_dir())
    assert runs == ["000", "001", "002"]
    for name, lr in zip(runs[1:], (1e-3, 3e-3), strict=True):
        _, record = load_head(find_checkpoint(Path(config.out) / name))
        assert record["settings"]["lr"] == lr
    single = replace(config, out=str(tmp_path / "single"))
    fit(single)
    assert_same_run(single.out, Path(config.out) / "002")

    assert output.count("best at") == 1  # from the main process only
    table = [line.split() for line in output[output.index("best at") :].splitlines()[2:5]]
    assert [line[0] for line in table] == ["002", "001", "000"]
    assert [line[1] for line in table] == ["0.003", "0.001", "1e+30"]
    assert table[2][-4:] == ["*", "loss", "not", "finite"]
    assert (Path(config.out) / "compare.png").is_file()


def test_optuna_searches_for_the_longest_acceptance_and_goes_on_where_it_stopped(config):
    """Its suggestions are the same when it is started again, so finished runs stay."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    search = ("hydra/sweeper=tpe", "lr=tag(log,interval(1e-4,1e-2))")
    first = sweep(config, *search, "hydra.sweeper.n_trials=2")
    again = sweep(config, *search, "hydra.sweeper.n_trials=3")
    assert first.count("finished after") == 0 and again.count("is finished after 8 steps") == 2
    rows = again[again.index("best at") :].splitlines()[2:5]
    assert {row.split()[0] for row in rows} == {"000", "001", "002"}
    results = (Path(config.out) / "optimization_results.yaml").read_text()
    best = float(results.split("best_value: ")[1])
    assert f" {best:.3f} " in rows[0]
