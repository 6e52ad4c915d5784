"""The training benchmark: what it compares is equal, and it reports every figure."""

from dataclasses import replace

import torch

from data.batches import pack
from data.cache.reader import FeatureCache
from data.config import TargetConfig
from data.targets.model import load_config, read_target_head
from tests.training import small_run
from train.acceptance import chain_acceptance, prepare_batch
from train.bench.plain import plain_estimate
from train.bench.run import bench
from train.head import DraftHead, draft_config


def test_the_papers_estimate_counts_what_ours_does(cache_path, target_path):
    """On every document of the cache; with a random head some chains are accepted by chance."""
    target = TargetConfig(path=str(target_path))
    target_head = read_target_head(target)
    torch.manual_seed(0)
    head = DraftHead(draft_config(load_config(target)))
    cache = FeatureCache(cache_path)
    accepted = 0
    for index in range(len(cache)):
        packed = pack(cache, [index])
        if not len(packed.supervised):
            continue
        batch = prepare_batch(packed, [cache.ids[index]], target_head)
        ours = chain_acceptance(head, target_head, [batch], num_steps=3).counts
        assert plain_estimate(head, target_head, packed, num_steps=3).to_json() == ours.to_json()
        accepted += int(ours.accepted.sum())
    assert accepted > 0


def test_the_benchmark_gives_every_figure_and_writes_nothing(cache_path, tmp_path):
    config = replace(small_run(cache_path, tmp_path / "run"), max_steps=2)
    figures = bench(config)
    assert figures["batches"] == 2
    for name in ("vs_plain", "of_matmul_limit", "memory_vs_plain", "estimate_vs_one_by_one"):
        assert figures[name] > 0
    assert 0 <= figures["data_wait"] < 1
    assert not (tmp_path / "run").exists()
