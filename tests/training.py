"""Small training runs, alone and launched, and what they leave behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from train.config import HeldoutConfig, TrainConfig

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def small_run(cache: Path, out: Path, **changes) -> TrainConfig:
    """Eight steps over the tiny cache, with a checkpoint and an estimate every four."""
    values = dict(
        features=str(cache),
        out=str(out),
        max_steps=8,
        batch_tokens=1000,
        micro_batch_tokens=1000,
        lr=3e-3,
        save_every=4,
        log_every=4,
        heldout=HeldoutConfig(share=0.2),
    )
    return TrainConfig(**{**values, **changes})


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
    """The start of a command line under `accelerate launch` with a file of conf/launch."""
    accelerate = [sys.executable, "-m", "accelerate.commands.launch"]
    return (*accelerate, "--config_file", str(ROOT / "conf" / "launch" / file), *arguments)


def start(arguments: list[str], **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        arguments,
        cwd=ROOT,
        env={**ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(arguments: list[str], **environment: str) -> str:
    """What the command printed; it must succeed."""
    process = start(arguments, **environment)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    return output


def weights(run: str | Path, step: int = 8) -> dict[str, Tensor]:
    return load_file(Path(run) / "steps" / f"{step:06d}" / "head.safetensors")


def rows(run: str | Path, having: str) -> list[dict]:
    """The lines of metrics.jsonl that have this key."""
    lines = map(json.loads, (Path(run) / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if having in line]


def losses(run: str | Path) -> list[tuple[int, float, float]]:
    return [(r["step"], r["smooth_l1"], r["cross_entropy"]) for r in rows(run, "smooth_l1")]


def forget_last(run: str | Path, step: int = 8) -> None:
    """Leave the run as if it had died before its last checkpoint was whole."""
    (Path(run) / "steps" / f"{step:06d}" / "checkpoint.json").unlink()


def assert_same_run(
    one: str | Path, other: str | Path, *, exactly: bool = False, estimates: bool = True
) -> None:
    """Weights, losses, gradient norms, rates and estimates agree: to rounding, or bit for bit."""
    for name, tensor in weights(one).items():
        if exactly:
            assert weights(other)[name].equal(tensor), name
        else:
            assert_close(tensor, weights(other)[name], rtol=1e-3, atol=2e-5, msg=name)
    assert len(losses(one)) == len(losses(other)) == 8
    for ours, theirs in zip(rows(one, "lr"), rows(other, "lr"), strict=True):
        for name in ("step", "epoch", "lr", "supervised"):
            assert ours[name] == theirs[name], name
        for name in ("smooth_l1", "cross_entropy", "grad_norm"):
            near = theirs[name] if exactly else pytest.approx(theirs[name], rel=1e-4)
            assert ours[name] == near, name
    if not estimates:
        return
    for ours, theirs in zip(rows(one, "heldout"), rows(other, "heldout"), strict=True):
        assert ours["heldout"]["tried"] == theirs["heldout"]["tried"]
        assert ours["heldout"]["accepted"] == theirs["heldout"]["accepted"]
