"""A run that was stopped goes on as if it had not been; another run is refused by name."""

import fcntl
import json
import logging
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data.config import DatasetConfig, DumpConfig, TargetConfig
from data.dump.run import dump
from tests.kill_train import short_run
from tests.tiny import save_tiny_chats, save_tiny_target
from tests.training import (
    ENVIRONMENT,
    ROOT,
    assert_same_run,
    command,
    launch,
    rows,
    run,
    small_run,
    start,
    weights,
)
from train.config import HeadConfig, HeldoutConfig, TrainConfig
from train.fit.checkpoints import find_checkpoint, load_head
from train.fit.loop import fit

TIMES = ("seconds", "data_wait", "elapsed")  # what no two runs share


@pytest.fixture
def config(cache_path, tmp_path) -> TrainConfig:
    return small_run(cache_path, tmp_path / "run")


@pytest.fixture(scope="module")
def every_step(cache_path, tmp_path_factory) -> TrainConfig:
    """A finished run that has kept the checkpoint of each of its eight steps."""
    out = tmp_path_factory.mktemp("every") / "run"
    config = small_run(cache_path, out, save_every=1, keep=8)
    fit(config)
    return config


def cut(config: TrainConfig, out: Path, *, after: int) -> TrainConfig:
    """A copy of the run as if it had died after this step's checkpoint."""
    shutil.copytree(config.out, out)
    for folder in (out / "steps").iterdir():
        if int(folder.name) > after:
            shutil.rmtree(folder)
    return replace(config, out=str(out))


def remains(run: str | Path) -> dict:
    """All that a run has left behind, without its times and its own name."""
    found = {}
    for file in sorted(Path(run).rglob("*")):
        name = str(file.relative_to(run))
        if file.suffix == ".safetensors":
            found[name] = {n: t.numpy().tobytes() for n, t in load_file(file).items()}
        elif file.name == "metrics.jsonl":
            found[name] = [
                {key: value for key, value in row.items() if key not in TIMES}
                for row in map(json.loads, file.read_text().splitlines())
            ]
        elif file.name == "run.json":
            found[name] = json.loads(file.read_text())["result"]
        elif file.name == "checkpoint.json":
            found[name] = json.loads(file.read_text())
            del found[name]["settings"]["out"]
        elif file.is_file():
            found[name] = file.read_bytes()
    return found


@pytest.mark.parametrize("step", range(1, 8))
def test_a_run_goes_on_bit_for_bit_after_any_step(every_step, tmp_path, step):
    """In the middle of an epoch and at its edge: weights, moments, losses, estimates, the best."""
    assert [row["epoch"] for row in rows(every_step.out, "epoch")] == [0] * 4 + [1] * 4
    resumed = cut(every_step, tmp_path / "resumed", after=step)
    fit(resumed)
    assert remains(resumed.out) == remains(every_step.out)


def test_a_run_killed_at_any_rename_or_removal_ends_with_the_same_bytes(cache_path, tmp_path):
    kills = [sys.executable, "-m", "tests.kill_train", str(cache_path), str(tmp_path)]
    subprocess.run(kills, cwd=ROOT, env=ENVIRONMENT, check=True, timeout=600)
    folders = sorted(tmp_path.iterdir(), key=lambda folder: int(folder.name))
    # run.json, record, folder and best.json of three checkpoints, two removals, run.json
    assert len(folders) > 10
    expected = remains(folders[-1])  # the survivor's
    for folder in folders[:-1]:
        for checkpoint in (folder / "steps").glob("[0-9]*[0-9]"):
            if (checkpoint / "checkpoint.json").is_file():
                load_head(checkpoint)  # whatever has a record is whole
        fit(short_run(cache_path, folder))
        assert remains(folder) == expected, folder.name


def test_a_run_killed_while_it_trains_goes_on_bit_for_bit(every_step, tmp_path):
    killed = replace(every_step, out=str(tmp_path / "killed"))
    process = start(command(killed))
    wait_for(Path(killed.out) / "steps" / "000002")
    process.kill()
    process.communicate()
    assert not (Path(killed.out) / "steps" / "000008").is_dir(), "it ended before the kill"
    fit(killed)
    assert_same_run(every_step.out, killed.out, exactly=True)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.002)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_an_interrupted_run_says_shortly_how_to_go_on(config, number):
    process = start(command(replace(config, max_steps=2000, save_every=1)))
    wait_for(Path(config.out) / "steps" / "000002")
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode > 0
    assert f"Stopped. The same command goes on from the newest checkpoint in {config.out}" in output
    assert "Traceback" not in output
    assert not list((Path(config.out) / "steps").glob("*.tmp"))


def test_one_process_then_two_then_one(every_step, tmp_path):
    one = cut(every_step, tmp_path / "run", after=2)
    run(command(replace(one, max_steps=8), *launch("ddp.yaml")))
    two = cut(one, tmp_path / "again", after=5)
    fit(two)
    assert_same_run(every_step.out, two.out)


def test_a_finished_run_does_nothing(config):
    before = fit(config)
    times = {p: p.stat().st_mtime_ns for p in Path(config.out).rglob("*") if p.name != ".lock"}
    assert fit(config) == before
    assert times == {p: p.stat().st_mtime_ns for p in times}


def test_what_changes_no_update_may_differ_when_a_run_goes_on(every_step, tmp_path):
    resumed = cut(every_step, tmp_path / "resumed", after=4)
    fit(replace(resumed, save_every=2, keep=1, log_every=1, micro_batch_tokens=300))
    assert_same_run(every_step.out, resumed.out, estimates=False)


def test_other_settings_into_the_same_run_are_refused_by_name(config):
    fit(config)
    for change, named in (
        ({"lr": 0.001}, r"lr: 0.003 there, 0.001 here"),
        ({"noise": "none"}, r"noise: paper there, none here"),
        ({"head": HeadConfig(intermediate_size=48)}, r"head.intermediate_size: None there, 48"),
        ({"heldout": HeldoutConfig(share=0.3)}, r"heldout.share: 0.2 there, 0.3 here"),
        ({"max_steps": 9}, r"max_steps: 8 there, 9 here"),
    ):
        with pytest.raises(ValueError, match=rf"(?s){named}.*out="):
            fit(replace(config, **change))


def test_other_data_and_another_target_are_refused_by_name(config, target_path, tmp_path):
    fit(config)
    chats = save_tiny_chats(tmp_path / "chats.json", 30, seed=1)
    for name, target in (
        ("data", target_path),
        ("target", save_tiny_target(tmp_path / "other", seed=1)),
    ):
        other = DumpConfig(
            target=TargetConfig(path=str(target)),
            dataset=DatasetConfig(path=str(chats)),
            out=str(tmp_path / name),
        )
        with pytest.raises(ValueError, match=r"features, the cache: .* there, .* here") as error:
            fit(replace(config, features=str(dump(other))))
        assert ("target, " in str(error.value)) == (name == "target")


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_goes_on(every_step, tmp_path):
    resumed = cut(every_step, tmp_path / "resumed", after=5)
    damaged = Path(resumed.out) / "steps" / "000005"
    (damaged / "moments.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=rf"{damaged}/moments.*Delete {damaged}: .* before it"):
        fit(resumed)
    shutil.rmtree(damaged)
    fit(resumed)
    assert_same_run(every_step.out, resumed.out, exactly=True)


def test_a_second_training_in_the_same_folder_is_refused(config):
    Path(config.out).mkdir()
    with (Path(config.out) / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match=r"Another training is writing into .*out="):
            fit(config)


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


def test_a_checkpoint_holds_the_head_alone_whatever_the_target_shares(config, target_path):
    """The tiny target ties its matrices: together in one state, no safetensors file takes them."""
    assert json.loads((target_path / "config.json").read_text())["tie_word_embeddings"]
    fit(replace(config, save_every=1, max_steps=1))
    head, _ = load_head(find_checkpoint(Path(config.out)))
    assert set(weights(config.out, 1)) == {name for name, _ in head.named_parameters()}


def test_the_disk_that_checkpoints_take_is_said_first_and_refused_if_missing(
    config, caplog, monkeypatch
):
    with caplog.at_level(logging.INFO):
        fit(config)
    size = sum(f.stat().st_size for f in (Path(config.out) / "steps" / "000008").iterdir())
    stated = 3 * 4 * sum(tensor.numel() for tensor in weights(config.out).values())
    assert stated == pytest.approx(size, rel=0.15)  # a config and a record are small beside it
    assert f"checkpoints: 3 x {stated / 1000:.0f} kB at most in {config.out}/steps" in caplog.text

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6, 4 * stated - 1))
    elsewhere = replace(config, out=f"{config.out}2")
    with pytest.raises(ValueError, match=r"need \d+ kB more.*keep=2.*out="):
        fit(elsewhere)
    fit(replace(elsewhere, keep=1))


def test_a_full_disk_at_a_save_leaves_the_checkpoints_before_it_whole(config, tmp_path):
    fit(config)
    undisturbed = shutil.copytree(config.out, tmp_path / "undisturbed")
    shutil.rmtree(Path(config.out) / "steps" / "000008")
    limited = ["bash", "-c", 'ulimit -f 64; exec "$@"', "-", *command(config)]  # 64 kB a file
    process = start(limited)
    output = process.communicate(timeout=120)[0]
    folder = Path(config.out) / "steps" / "000008"
    assert process.returncode == 1 and f"error: Cannot write {folder}" in output, output
    assert "Traceback" not in output
    assert [p.name for p in (Path(config.out) / "steps").iterdir()] == ["000004"]
    fit(config)
    assert_same_run(undisturbed, config.out, exactly=True)


@pytest.fixture
def hopeless(config) -> TrainConfig:
    """A run that never gets better than its first estimate."""
    return replace(config, lr=1e-12, save_every=1, patience=2)


def test_a_run_without_progress_stops_early_and_says_so(hopeless, caplog):
    caplog.set_level(logging.INFO)
    best = fit(hopeless)
    assert len(rows(hopeless.out, "lr")) == 3  # the best one, and two more
    assert "stopping early after step 3 of 8: 2 estimates in a row (patience)" in caplog.text
    result = json.loads((Path(hopeless.out) / "run.json").read_text())["result"]
    assert result == {"step": 3, "why": "patience"}
    assert fit(hopeless) == best and f"{hopeless.out} is finished after 3 steps" in caplog.text
    fit(replace(hopeless, patience=None))
    assert len(rows(hopeless.out, "lr")) == 8


def test_patience_counts_on_when_a_run_goes_on_also_with_two_processes(hopeless, tmp_path):
    fit(hopeless)
    resumed = cut(hopeless, tmp_path / "resumed", after=2)
    run([*command(resumed, *launch("ddp.yaml")), "patience=2"])
    assert [row["step"] for row in rows(resumed.out, "lr")] == [1, 2, 3]


def test_patience_without_estimates_is_refused(config):
    with pytest.raises(ValueError, match=r"patience=2 .* heldout.share=0 makes none"):
        replace(config, patience=2, heldout=HeldoutConfig(share=0))
