"""The dump's benchmark compares like with like, and says so in one line of JSON."""

import json
import os
import subprocess
import sys

import torch

from data.cache import FeatureCache
from data.config import TargetConfig
from data.plain_dump import plain_dump, read_plain
from data.plan import read_plan, read_tokens
from data.target import load_target


def test_the_plain_dump_stores_what_ours_does(cache_path, target_path, tmp_path):
    cache, plan = FeatureCache(cache_path), read_plan(cache_path)
    target = load_target(TargetConfig(path=str(target_path), device="cpu"))
    tokens = read_tokens(cache_path, plan)
    plain_dump(target, tokens, range(3, 6), tmp_path, dtype=torch.bfloat16)
    plain_dump(target, tokens, [9], tmp_path, dtype=torch.bfloat16)
    for number, index in enumerate([3, 4, 5, 9]):
        ours, plain = cache.sequence(index), read_plain(tmp_path, number)
        assert plain["input_ids"].equal(ours.input_ids)
        assert plain["loss_mask"].bool().equal(ours.loss_mask)
        # Batches of other shapes round otherwise, by a bit of bfloat16 at most.
        torch.testing.assert_close(plain["hidden_state"], ours.features, rtol=2**-7, atol=1e-6)


def test_the_benchmark_ends_with_its_ratios_and_leaves_nothing(target_path, chats_path, tmp_path):
    out = tmp_path / "bench"
    command = [sys.executable, "-m", "scripts.bench_dump", f"target={target_path}"]
    command += [f"dataset={chats_path}", f"out={out}", "max_length=256", "dataset.limit=8"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    for name in ("vs_forward", "vs_plain", "read_vs_pickle"):
        assert figures[name] > 0
    if figures["two_processes"] is None:
        assert figures["two_processes_reason"]
    else:
        assert figures["two_processes"] > 0
    assert figures["num_sequences"] == 8
    assert not out.exists()
