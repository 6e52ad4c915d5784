"""The feature cache as its readers see it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from data.cache.reader import FeatureCache, supervised_counts, supervised_pairs
from data.chats.conversations import Counts, read_conversations
from data.chats.rendering import render
from data.config import DatasetConfig, DumpConfig, TargetConfig
from data.dump.run import dump
from data.targets.model import load_target


@pytest.fixture(scope="module")
def cache_path(target_path, chats_path, tmp_path_factory) -> Path:
    """A cache of 24 chats in several shards."""
    return dump(
        DumpConfig(
            target=TargetConfig(path=str(target_path), device="cpu"),
            dataset=DatasetConfig(path=str(chats_path)),
            out=str(tmp_path_factory.mktemp("cache")),
            max_length=256,
            shard_tokens=1000,
            batch_tokens=512,
        )
    )


def test_a_pair_counts_if_both_of_its_next_tokens_are_of_one_reply():
    # token       u0     u1     a2    a3    a4    u5     a6    a7
    loss_mask = [False, False, True, True, True, False, True, True]
    # pair j is (f_j, t_{j+1}) and predicts t_{j+2}: pair 1 feeds a2 and predicts a3
    expected = [False, True, True, False, False, True, False]
    assert supervised_pairs(torch.tensor(loss_mask)).tolist() == expected


@pytest.mark.parametrize("length", [0, 1, 2])
def test_too_short_a_sequence_has_no_pair_that_counts(length):
    pairs = supervised_pairs(torch.ones(length, dtype=torch.bool))
    assert pairs.shape == (max(length - 1, 0),)
    assert not pairs.any()


def test_counts_over_many_sequences_are_those_of_each():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        lengths = torch.randint(0, 6, (8,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        loss_mask = torch.rand(int(offsets[-1]), generator=generator) < 0.7
        each = [supervised_pairs(part).sum().item() for part in loss_mask.split(lengths.tolist())]
        assert supervised_counts(loss_mask, offsets).tolist() == each


def test_the_cache_holds_the_tokens_and_features_of_every_chat(cache_path, target_path, chats_path):
    cache = FeatureCache(cache_path)
    target = load_target(TargetConfig(path=str(target_path), device="cpu"))
    conversations = read_conversations(DatasetConfig(path=str(chats_path)), Counts())
    expected = [s for c in conversations for s in render(target.tokenizer, c, max_length=256)]

    assert cache.ids == [sequence.id for sequence in expected]
    assert cache.lengths.tolist() == [len(sequence.input_ids) for sequence in expected]
    assert len(cache) == 24
    assert cache.hidden_size == 32
    assert len(cache.manifest["shards"]) > 2
    for index, sequence in enumerate(expected):
        got = cache.sequence(index)
        assert got.input_ids.tolist() == sequence.input_ids
        assert got.loss_mask.tolist() == sequence.loss_mask
        features = target.features(got.input_ids[None])[0]
        assert_close(got.features, features.bfloat16(), rtol=2e-2, atol=2e-2)
        assert cache.num_supervised[index] == supervised_pairs(got.loss_mask).sum()


def test_the_manifest_counts_what_is_there(cache_path):
    cache = FeatureCache(cache_path)
    manifest = cache.manifest
    assert manifest["num_sequences"] == len(cache)
    assert manifest["num_tokens"] == cache.lengths.sum()
    assert manifest["num_supervised"] == cache.num_supervised.sum()
    assert sum(shard["num_tokens"] for shard in manifest["shards"]) == manifest["num_tokens"]


def test_a_token_costs_two_bytes_a_channel_and_five(cache_path):
    for file in sorted((cache_path / "shards").glob("*.safetensors")):
        tensors = load_file(file)
        num_tokens = len(tensors["input_ids"])
        num_bytes = sum(t.nbytes for name, t in tensors.items() if name != "offsets")
        assert num_bytes == num_tokens * (2 * 32 + 5)


def test_an_index_outside_is_an_error(cache_path):
    cache = FeatureCache(cache_path)
    with pytest.raises(IndexError):
        cache.sequence(24)
    with pytest.raises(IndexError):
        cache.sequence(-1)


def test_what_is_no_finished_cache_is_refused(cache_path, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no feature cache .*absent. Make it with `python"):
        FeatureCache(tmp_path / "absent")

    copy = Path(shutil.copytree(cache_path, tmp_path / "copy"))
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "format_version": 0}))
    with pytest.raises(ValueError, match=r"format_version 0, but this version reads 2"):
        FeatureCache(copy)

    (copy / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"unfinished: it has a plan but no manifest"):
        FeatureCache(copy)


def test_a_shard_that_was_cut_is_named(cache_path, tmp_path):
    copy = Path(shutil.copytree(cache_path, tmp_path / "copy"))
    shard = copy / "shards" / "00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"00001.safetensors has \d+ bytes, but the manifest says"):
        FeatureCache(copy)
    shard.unlink()
    with pytest.raises(ValueError, match=r"00001.safetensors has no file"):
        FeatureCache(copy)
