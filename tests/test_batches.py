import shutil
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.batches import PackedBatch, add_noise, pack, plan_epoch, prefetch, split_step
from data.cache.reader import FeatureCache, supervised_pairs

LENGTHS = torch.tensor([30, 5, 12, 40, 7, 7, 25, 60, 3, 18])
EVERYTHING = list(range(len(LENGTHS)))


def test_an_epoch_uses_every_sequence_once_and_keeps_to_the_budget():
    steps = plan_epoch(EVERYTHING, LENGTHS, seed=0, epoch=0, batch_tokens=50)
    assert sorted(index for step in steps for index in step) == EVERYTHING
    for step in steps:
        assert len(step) == 1 or LENGTHS[step].sum() <= 50


def test_the_order_is_a_pure_function_of_seed_and_epoch():
    def plan(seed, epoch):
        return plan_epoch(EVERYTHING, LENGTHS, seed=seed, epoch=epoch, batch_tokens=50)

    assert plan(0, 1) == plan(0, 1)
    assert plan(0, 1) != plan(0, 2) and plan(0, 1) != plan(1, 1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 16])
def test_a_step_is_shared_out_whole_with_the_same_number_of_forwards(world_size):
    shares = split_step(EVERYTHING, LENGTHS, world_size=world_size, micro_batch_tokens=64)
    assert len(shares) == world_size
    assert len({len(share) for share in shares}) == 1
    flat = [index for share in shares for micro_batch in share for index in micro_batch]
    assert sorted(flat) == EVERYTHING


def test_shares_are_balanced_by_tokens():
    shares = split_step(EVERYTHING, LENGTHS, world_size=2, micro_batch_tokens=1000)
    loads = [sum(int(LENGTHS[i]) for part in share for i in part) for share in shares]
    assert max(loads) <= 1.1 * min(loads)


def test_a_batch_holds_the_pairs_of_the_cache(cache):
    """Feature j and token j+1 in, feature j+1 out, where tokens j+1 and j+2 both count."""
    batch = pack(cache, [3, 0])
    offset = 0
    seen = 0
    for index, length in zip(batch.sequences, batch.lengths, strict=True):
        sequence = cache.sequence(index)
        rows = slice(offset, offset + length)
        assert torch.equal(batch.features[rows], sequence.features[:length])
        assert torch.equal(batch.next_ids[rows], sequence.input_ids[1 : length + 1])
        pairs = supervised_pairs(sequence.loss_mask).nonzero().squeeze(1)
        here = batch.supervised[seen : seen + len(pairs)]
        assert torch.equal(here, pairs + offset)
        wanted = sequence.features[pairs + 1]
        assert torch.equal(batch.target_features[seen : seen + len(pairs)], wanted)
        offset += length
        seen += len(pairs)
    assert seen == len(batch.supervised) and offset == len(batch.features)


def test_what_follows_the_last_supervised_pair_may_hold_anything(cache_path, cache, tmp_path):
    """Rows of nan there reach neither loss nor gradient, not even as 0 * nan."""
    copy = Path(shutil.copytree(cache_path, tmp_path / "cache"))
    poisoned = 0
    for file in sorted((copy / "shards").glob("*.safetensors")):
        shard = load_file(file)
        for start, end in pairwise(shard["offsets"].tolist()):
            pairs = supervised_pairs(shard["loss_mask"][start:end]).nonzero().squeeze(1)
            rest = slice(start + int(pairs[-1]) + 2 if len(pairs) else start, end)
            shard["features"][rest] = float("nan")
            poisoned += end - rest.start
        save_file(shard, file)
    assert poisoned
    ours, clean = (pack(c, list(range(len(cache)))) for c in (FeatureCache(copy), cache))
    for name in ("features", "target_features", "next_ids", "supervised"):
        assert torch.equal(getattr(ours, name), getattr(clean, name))


def test_noise_is_the_same_however_a_sequence_is_batched(cache):
    settings = {"kind": "paper", "width": 0.1, "seed": 0, "epoch": 2}
    together, alone = pack(cache, [4, 7]), pack(cache, [7])
    noisy = add_noise(together, **settings)
    assert torch.equal(noisy[together.lengths[0] :], add_noise(alone, **settings))
    other_epoch = add_noise(alone, **{**settings, "epoch": 3})
    assert not torch.equal(other_epoch, add_noise(alone, **settings))


def test_noise_is_uniform_in_its_width_and_on_the_inputs_only(cache):
    batch = pack(cache, list(range(10)))
    before = batch.target_features.clone()
    noise = add_noise(batch, kind="paper", width=0.1, seed=0, epoch=0) - batch.features.float()
    assert noise.abs().max() <= 0.1 + 1e-5
    assert abs(float(noise.mean())) < 0.002
    assert abs(float(noise.std()) - 0.1 / 3**0.5) < 0.001
    assert torch.equal(batch.target_features, before)


def test_reference_noise_is_scaled_by_512_over_the_length(cache):
    batch = pack(cache, [2])
    plain = add_noise(batch, kind="paper", width=0.01, seed=0, epoch=0) - batch.features.float()
    scaled = add_noise(batch, kind="reference", width=0.01, seed=0, epoch=0)
    scaled = scaled - batch.features.float()
    torch.testing.assert_close(scaled, plain * (512 / batch.lengths[0]), rtol=1e-3, atol=1e-5)


def test_no_noise_leaves_the_features_alone(cache):
    batch = pack(cache, [2])
    clean = add_noise(batch, kind="none", width=0.1, seed=0, epoch=0)
    assert torch.equal(clean, batch.features.float())


def test_an_empty_share_is_a_batch_of_no_pairs(cache):
    batch = pack(cache, [])
    assert isinstance(batch, PackedBatch)
    assert batch.lengths == [0] and len(batch.supervised) == 0
    assert add_noise(batch, kind="paper", width=0.1, seed=0, epoch=0).shape == (0, 32)


def test_prefetch_keeps_the_order_and_passes_errors_on():
    def load(number):
        if number == 7:
            raise ValueError("seven")
        return number * 2

    got = []
    with pytest.raises(ValueError, match="seven"):
        for item in prefetch(range(10), load):
            got.append(item)
    assert got == [0, 2, 4, 6, 8, 10, 12]


def test_prefetch_stops_loading_when_its_reader_leaves():
    loaded = []
    items = prefetch(range(1000), lambda n: loaded.append(n))
    next(items)
    items.close()
    time.sleep(0.5)
    count = len(loaded)
    time.sleep(0.5)
    assert len(loaded) == count < 10
