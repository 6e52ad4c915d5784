"""The dump's benchmark compares like with like, and says so in one line of JSON."""

import json

import torch

from data.cache.reader import FeatureCache
from data.config import TargetConfig
from data.dump.bench import bench, table
from data.dump.plain import plain_dump, read_plain
from data.dump.plan import read_plan, read_tokens
from data.targets.model import load_target
from tests.kill_dump import small_dump


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


def test_the_benchmark_gives_every_ratio_and_leaves_nothing(target_path, chats_path, tmp_path):
    out = tmp_path / "bench"
    figures = bench(small_dump(str(target_path), str(chats_path), out, shard_tokens=400))
    ratios = ["vs_forward", "vs_plain", "two_processes", "read_vs_pickle", "read_vs_pickle_cold"]
    for name in ratios:
        if figures[name] is not None:
            assert figures[name] > 0
            assert f"{figures[name]:.2f}" in table(figures)
    assert (figures["two_processes"] is None) == (figures["two_processes_reason"] is not None)
    assert json.loads(json.dumps(figures)) == figures
    assert not out.exists()
