import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from data.batches import add_noise, pack
from data.config import TargetConfig
from data.target import load_config, read_target_head
from train.checkpoints import find_checkpoint, load_head
from train.config import HeadConfig, HeldoutConfig, LossConfig, TrainConfig
from train.head import DraftHead, draft_config
from train.loop import fit
from train.loss import distillation_loss
from train.plain import plain_loss
from train.plan import learning_rate
from train.vocabulary import reply_token_counts

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


@pytest.fixture
def config(cache_path, tmp_path) -> TrainConfig:
    return TrainConfig(
        features=str(cache_path),
        out=str(tmp_path / "run"),
        max_steps=8,
        batch_tokens=1000,
        micro_batch_tokens=1000,
        lr=3e-3,
        save_every=4,
        log_every=4,
        heldout=HeldoutConfig(share=0.2),
    )


def weights(run: str | Path, step: int = 8) -> dict[str, torch.Tensor]:
    return load_file(Path(run) / "steps" / f"{step:06d}" / "head.safetensors")


def losses(run: str | Path) -> list[tuple[int, float, float]]:
    rows = map(json.loads, (Path(run) / "metrics.jsonl").read_text().splitlines())
    return [(r["step"], r["smooth_l1"], r["cross_entropy"]) for r in rows if "smooth_l1" in r]


def assert_same_run(one: str | Path, other: str | Path, *, exactly: bool = False) -> None:
    for name, tensor in weights(one).items():
        if exactly:
            assert torch.equal(tensor, weights(other)[name]), name
        else:
            assert_close(tensor, weights(other)[name], rtol=1e-3, atol=2e-5, msg=name)
    assert len(losses(one)) == len(losses(other)) == 8
    for ours, theirs in zip(losses(one), losses(other), strict=True):
        assert ours == (theirs if exactly else pytest.approx(theirs, rel=1e-4))


def command(config: TrainConfig, *launcher: str) -> list[str]:
    """The command line of a training run with these settings."""
    start = launcher or (sys.executable,)
    return [
        *start,
        "-m",
        "scripts.train_head",
        f"features={config.features}",
        f"out={config.out}",
        f"max_steps={config.max_steps}",
        f"batch_tokens={config.batch_tokens}",
        f"micro_batch_tokens={config.micro_batch_tokens}",
        f"lr={config.lr}",
        f"save_every={config.save_every}",
        f"log_every={config.log_every}",
        f"heldout.share={config.heldout.share}",
    ]


def launch(file: str, *arguments: str) -> tuple[str, ...]:
    accelerate = [sys.executable, "-m", "accelerate.commands.launch"]
    return (*accelerate, "--config_file", str(ROOT / "conf" / "launch" / file), *arguments)


def run(arguments: list[str]) -> str:
    result = subprocess.run(arguments, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_training_lowers_the_loss_and_keeps_the_target_frozen(config, target_path):
    files = {p: p.read_bytes() for p in target_path.iterdir()}
    length = fit(replace(config, max_steps=40, save_every=20))
    first, last = losses(config.out)[0], losses(config.out)[-1]
    assert last[1] < 0.9 * first[1] and last[2] < first[2]
    assert length >= 1.0
    assert all(p.read_bytes() == content for p, content in files.items())


def test_the_update_does_not_depend_on_accumulation(config, tmp_path):
    fit(config)
    cut = replace(config, out=str(tmp_path / "cut"), micro_batch_tokens=250)
    fit(cut)
    assert_same_run(config.out, cut.out)


def test_the_update_does_not_depend_on_the_chunks_of_the_loss(config, tmp_path):
    fit(config)
    cut = replace(config, out=str(tmp_path / "cut"), loss=LossConfig(chunk_rows=7))
    fit(cut)
    assert_same_run(config.out, cut.out)


@pytest.mark.parametrize(("file", "processes"), [("single.yaml", 1), ("ddp.yaml", 2)])
def test_a_launch_trains_what_a_plain_run_does(config, tmp_path, file, processes):
    """Each rank has sequences of its own; a budget of 60 tokens leaves some ranks without any."""
    few = replace(config, batch_tokens=120, micro_batch_tokens=60)
    fit(few)
    launched = replace(few, out=str(tmp_path / "launched"))
    output = run(command(launched, *launch(file, "--num_processes", str(processes))))
    assert f"{processes} process(es)" in output
    assert_same_run(few.out, launched.out)


def test_zero_2_trains_what_plain_training_does_and_resumes(config, tmp_path):
    pytest.importorskip("deepspeed")
    cut = replace(config, micro_batch_tokens=250)
    fit(cut)
    zero = replace(cut, out=str(tmp_path / "zero"))
    run(command(zero, *launch("zero2.yaml")))
    assert_same_run(cut.out, zero.out)

    for file in (Path(zero.out) / "steps" / "000008").glob("checkpoint.json"):
        file.unlink()  # as if the run had died before its last checkpoint was whole
    output = run(command(zero, *launch("zero2.yaml")))
    assert "going on after step 4" in output
    assert_same_run(cut.out, zero.out)


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


def test_the_learning_rate_ends_with_the_run():
    config = TrainConfig(features="", out="", lr=1.0, warmup=0.1)
    rates = [learning_rate(step, 100, config) for step in range(1, 101)]
    assert max(rates) == 1.0 == rates[9]
    assert rates[0] == pytest.approx(0.1)
    assert 0 < rates[-1] < 1e-3
    assert all(later < earlier for earlier, later in pairwise(rates[9:]))


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


def test_a_non_finite_loss_stops_before_the_update_and_names_the_conversations(config):
    with pytest.raises(RuntimeError, match=r"step \d+ is not finite.*nonfinite.json"):
        fit(replace(config, lr=1e30, max_grad_norm=1e30, warmup=0.0, max_steps=50))
    record = json.loads((Path(config.out) / "nonfinite.json").read_text())
    assert record["conversations"]


def test_a_start_by_regression_predicts_before_any_training(config, cache, tmp_path):
    slow = replace(config, lr=1e-9, max_steps=1, save_every=1)
    fit(slow)
    fitted = replace(slow, out=str(tmp_path / "fitted"), head=HeadConfig(init="regression"))
    fit(fitted)
    assert losses(fitted.out)[0][1] < 0.7 * losses(slow.out)[0][1]
    assert all(math.isfinite(v) for v in losses(fitted.out)[0])


@pytest.mark.parametrize("sequences", [[0], [3, 0, 5, 9]])
def test_packed_training_equals_padded_training_in_loss_and_gradient(cache, target_path, sequences):
    """train/plain.py pads, masks and holds all logits; the sum and its gradient are the same."""
    target = TargetConfig(path=str(target_path))
    target_head = read_target_head(target).double()
    torch.manual_seed(0)
    head = DraftHead(draft_config(load_config(target))).double()
    batch = pack(cache, sequences)
    noisy = add_noise(batch, kind="paper", width=0.1, seed=0, epoch=0).double()
    weights = {"l1_weight": 1.0, "ce_weight": 0.1}

    predicted = head(target_head.embed(batch.next_ids), noisy, batch.lengths)
    ours = distillation_loss(
        predicted[batch.supervised], batch.target_features, target_head, **weights
    ).loss
    ours_gradient = torch.autograd.grad(ours, list(head.parameters()))
    plain = plain_loss(head, target_head, batch, noisy, **weights)
    plain_gradient = torch.autograd.grad(plain, list(head.parameters()))

    assert_close(ours, plain, rtol=1e-9, atol=1e-9)
    for a, b in zip(ours_gradient, plain_gradient, strict=True):
        assert_close(a, b, rtol=1e-6, atol=1e-9)


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


def test_a_reduced_loss_vocabulary_is_the_most_frequent_reply_tokens(config, cache, caplog):
    """The tiny chats use few of the byte tokens: 60 entries cover them all, 5 do not."""
    caplog.set_level("INFO", logger="train")
    fit(replace(config, loss=LossConfig(vocab=60)))
    assert "60 of 259 vocabulary entries, which are 100.00 %" in caplog.text
    sequences = list(range(len(cache)))
    counts = reply_token_counts(cache, sequences, vocab_size=259)
    replies = sum(int(cache.sequence(i).loss_mask.sum()) for i in sequences)
    assert int(counts.sum()) == replies
    assert 0 < int((counts > 0).sum()) < 60


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


def test_a_split_that_holds_nothing_out_is_refused(config):
    with pytest.raises(ValueError, match=r"heldout\.share=1e-09 holds none of the \d+ sequences"):
        fit(replace(config, heldout=HeldoutConfig(share=1e-9)))


def test_without_held_out_conversations_the_newest_checkpoint_counts(config):
    fit(replace(config, heldout=HeldoutConfig(share=0.0)))
    assert find_checkpoint(Path(config.out)).name == "000008"
    assert not (Path(config.out) / "best.json").exists()
    _, record = load_head(find_checkpoint(Path(config.out)))
    assert record["acceptance"] is None  # not a τ of 1 that nobody measured
