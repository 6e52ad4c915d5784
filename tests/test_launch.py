"""Training under every launcher of conf/launch: the same run, a whole head, and no hangs."""

import importlib.util
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from data.cache.reader import FeatureCache
from tests.training import (
    assert_same_run,
    command,
    forget_last,
    launch,
    run,
    small_run,
    start,
    weights,
)
from train.config import ExportConfig, TrainConfig
from train.fit.loop import fit
from train.serve.export import export


@pytest.fixture(scope="module")
def plain(cache_path, tmp_path_factory) -> TrainConfig:
    """A finished run of one process. Its step budget leaves some processes of two without data."""
    out = tmp_path_factory.mktemp("plain") / "run"
    config = small_run(cache_path, out, batch_tokens=120, micro_batch_tokens=60)
    fit(config)
    return config


@pytest.fixture
def launched(plain, tmp_path) -> TrainConfig:
    return replace(plain, out=str(tmp_path / "launched"))


def best_step(run: str) -> int:
    return json.loads((Path(run) / "best.json").read_text())["step"]


def need(file: str) -> None:
    if file.startswith("zero"):
        pytest.importorskip("deepspeed")


@pytest.mark.parametrize(
    ("file", "processes"),
    [("single.yaml", 1), ("ddp.yaml", 2), ("fsdp2.yaml", 2), ("zero2.yaml", 2), ("zero3.yaml", 2)],
)
def test_a_launch_trains_what_a_plain_run_does(plain, launched, file, processes):
    """Weights, losses, norms, rates and estimates. What it saves is whole: it can be exported, and
    a plain run goes on from its checkpoint.
    """
    need(file)
    output = run(command(launched, *launch(file, "--num_processes", str(processes))))
    assert f"{processes} process(es)" in output
    assert_same_run(plain.out, launched.out)

    exported = load_file(export(ExportConfig(checkpoint=launched.out)) / "model.safetensors")
    for name, tensor in weights(plain.out, best_step(plain.out)).items():
        assert_close(exported[name], tensor, rtol=1e-3, atol=2e-5, msg=name)
    forget_last(launched.out)
    fit(launched)
    assert_same_run(plain.out, launched.out)


@pytest.mark.parametrize("file", ["fsdp2.yaml", "zero2.yaml", "zero3.yaml"])
def test_a_plain_run_goes_on_with_three_processes(plain, launched, file):
    """Three do not divide the sizes of the parameters, so that slices have unequal lengths."""
    need(file)
    shutil.copytree(plain.out, launched.out)
    forget_last(launched.out)
    output = run(command(launched, *launch(file, "--num_processes", "3")))
    assert "going on after step 4" in output
    assert_same_run(plain.out, launched.out)


def test_two_machines_train_what_one_does(plain, launched):
    arguments = ["--num_processes", "2", "--main_process_port", "29611", "--machine_rank"]
    machines = [
        start(command(launched, *launch("multinode.yaml", *arguments, rank))) for rank in "01"
    ]
    outputs = [machine.communicate(timeout=300)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert_same_run(plain.out, launched.out)


def test_weights_and_moments_stay_float32_under_bfloat16(launched, tmp_path):
    """DeepSpeed rounds its weights to bfloat16 and keeps float32 ones apart: those are saved."""
    pytest.importorskip("deepspeed")
    launcher = launch("zero3.yaml", "--mixed_precision", "bf16")
    run(command(launched, *launcher))
    for tensor in weights(launched.out).values():
        assert tensor.dtype == torch.float32
        assert not tensor.bfloat16().float().equal(tensor)
    resumed = replace(launched, out=str(tmp_path / "resumed"))
    shutil.copytree(launched.out, resumed.out)
    forget_last(resumed.out)
    run(command(resumed, *launcher))
    assert_same_run(launched.out, resumed.out, exactly=True)


REFUSED = {
    "fsdp_version: 1": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"},
    "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "DecoderLayer",
    },
    "fsdp_offload_params: true": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_OFFLOAD_PARAMS": "true",
    },
    "--mixed_precision fp16": {"ACCELERATE_MIXED_PRECISION": "fp16"},
    "--dynamo_backend inductor": {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"},
    "zero_stage: 1": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"},
    "offload_optimizer_device: cpu": {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
    },
}
TRY_LAUNCHES = """
import json, os, sys
from accelerate.state import AcceleratorState
from train.config import TrainConfig
from train.fit.launch import start_accelerator
for name, variables in json.loads(sys.argv[1]).items():
    os.environ |= variables
    try:
        start_accelerator(TrainConfig(features="", out=""))
    except ValueError as error:
        print(name, "->", error)
    AcceleratorState().destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    for variable in variables:
        del os.environ[variable]
"""


def test_launches_that_cannot_work_are_refused_by_name():
    """In one child process, with the variables that `accelerate launch` sets for each."""
    tried = dict(REFUSED)
    if importlib.util.find_spec("deepspeed") is None:
        tried = {n: v for n, v in tried.items() if "ACCELERATE_USE_DEEPSPEED" not in v}
    output = run(
        [sys.executable, "-c", TRY_LAUNCHES, json.dumps(tried)],
        **{"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29613"},
    )
    for name in tried:
        assert f"{name} -> Training does not work with {name}" in output, output
    assert output.count("(fsdp2.yaml)") == len(tried)


@pytest.mark.parametrize("file", ["ddp.yaml", "zero2.yaml"])
def test_a_loss_that_is_not_finite_on_one_process_stops_all(cache_path, tmp_path, file):
    """One sequence is damaged, on one process: none waits for it, and one writes the list."""
    need(file)
    damaged = shutil.copytree(cache_path, tmp_path / "damaged")
    shard = damaged / "shards" / "00000.safetensors"
    tensors = load_file(shard)
    tensors["features"][: int(tensors["offsets"][1])] = float("nan")  # the first sequence
    save_file(tensors, shard)
    config = small_run(damaged, tmp_path / "run")
    process = start(command(config, *launch(file, "--num_processes", "2")))
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 1
    record = json.loads((tmp_path / "run" / "nonfinite.json").read_text())
    assert FeatureCache(damaged).ids[0] in record["conversations"]
    assert f"error: The loss of step {record['step']} is not finite" in output


@pytest.mark.parametrize("what", ["dies", "hangs"])
def test_a_process_that_dies_or_hangs_ends_the_others_with_a_message(cache_path, tmp_path, what):
    """It hangs for ten minutes, and the other one waits for 15 seconds."""
    arguments = ["-m", "tests.lame_rank", what, str(cache_path), str(tmp_path / "run")]
    process = start([*launch("ddp.yaml"), *arguments])
    output = process.communicate(timeout=240)[0]
    assert process.returncode != 0
    assert "The same command goes on from the newest checkpoint" in output
    if what == "hangs":
        assert "Process 0 of 2 has lost another one, or waited 0:00:15 for it" in output
