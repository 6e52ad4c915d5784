import json
from pathlib import Path

import pytest
import torch

from data.cache.reader import FeatureCache
from data.config import TargetConfig
from tests.runs import save_tiny_run
from tests.tiny import save_tiny_target, tiny_llama_config
from tests.training import small_run
from train.config import HeldoutConfig, TokenMapConfig, TrainConfig
from train.fit.loop import fit
from train.fit.plan import split_cache
from train.token_map import build_token_map, check_size, most_frequent, reply_ends, share

EOS = 2  # <|im_end|>


@pytest.fixture
def config(cache_path, tmp_path) -> TokenMapConfig:
    return TokenMapConfig(
        features=str(cache_path),
        size=12,
        out=str(tmp_path / "maps" / "map.pt"),
        heldout=HeldoutConfig(share=0.2),
    )


def record(config: TokenMapConfig) -> dict:
    return json.loads(Path(config.out + ".json").read_text())


def counted(cache: FeatureCache, sequences: list[int]) -> dict[int, int]:
    """Token -> how often it stands in these sequences' replies, one by one."""
    counts: dict[int, int] = {}
    for index in sequences:
        input_ids, loss_mask = cache.tokens(index)
        for token, supervised in zip(input_ids.tolist(), loss_mask.tolist(), strict=True):
            if supervised:
                counts[token] = counts.get(token, 0) + 1
    return counts


def test_the_map_is_the_most_frequent_tokens_of_training_replies_and_no_others(config, cache):
    chosen = build_token_map(config)
    training, _ = split_cache(cache, TrainConfig(heldout=config.heldout))
    counts = counted(cache, training)
    ranked = sorted(counts, key=lambda token: (token != EOS, -counts[token], token))
    assert chosen == ranked[:12]


def test_sglang_can_read_the_file_without_running_code(config):
    chosen = build_token_map(config)
    read = torch.load(config.out, weights_only=True)
    assert type(read) is list and all(type(token) is int for token in read)
    assert read == chosen and len(set(read)) == 12


def test_coverage_is_counted_in_training_and_in_heldout_replies(config, cache):
    chosen = set(build_token_map(config))
    parts = split_cache(cache, TrainConfig(heldout=config.heldout))
    row = next(row for row in record(config)["sizes"] if row["size"] == 12)
    for name, sequences in zip(("training", "heldout"), parts, strict=True):
        counts = counted(cache, sequences)
        inside = sum(count for token, count in counts.items() if token in chosen)
        assert row[name] == pytest.approx(inside / sum(counts.values()))
    assert row["training"] != row["heldout"]


def test_a_token_that_ends_a_reply_is_in_every_map_however_rare_it_is():
    counts = torch.tensor([0, 9, 0, 7, 8])
    assert most_frequent(counts, 2, always=[2]).tolist() == [2, 1]
    assert most_frequent(counts, 5, always=[2]).tolist() == [2, 1, 4, 3, 0]


def test_all_the_tokens_at_which_the_target_stops_are_found(tmp_path):
    target = save_tiny_target(tmp_path, tiny_llama_config(eos_token_id=[2, 40]))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 50]}))
    assert reply_ends(TargetConfig(path=str(target))) == [2, 40, 50]


def test_a_map_costs_acceptance_and_a_whole_one_costs_nothing(config, fitted):
    config.head, config.size = str(fitted), 8
    build_token_map(config)
    small, *_, whole = [row["acceptance"] for row in record(config)["sizes"]]
    assert 1.0 < small["acceptance_length"] < whole["acceptance_length"]
    lines = [json.loads(line) for line in (fitted / "metrics.jsonl").read_text().splitlines()]
    estimate = [line["heldout"] for line in lines if "heldout" in line][-1]
    assert whole["accepted"] == estimate["accepted"] and whole["tried"] == estimate["tried"]
    assert whole["sampling_alpha"] == pytest.approx(estimate["sampling_alpha"])


@pytest.fixture(scope="module")
def fitted(cache_path, tmp_path_factory) -> Path:
    """A run whose head accepts something on the tiny cache."""
    out = tmp_path_factory.mktemp("fitted") / "run"
    fit(small_run(cache_path, out, max_steps=60, save_every=60, log_every=60, lr=1e-2))
    return out


def test_sizes_that_cannot_be_are_refused(config):
    config.size = 260
    with pytest.raises(ValueError, match="size is 260, but the target has 259 tokens"):
        build_token_map(config)
    assert not Path(config.out).exists()
    with pytest.raises(ValueError, match="size is 0, but must be at least 1"):
        TokenMapConfig(size=0)


def test_a_map_that_has_no_room_for_the_ends_of_replies_is_refused():
    check_size(2, vocab_size=9, ends=[2, 5])
    with pytest.raises(ValueError, match=r"always holds the 2 tokens that end a reply"):
        check_size(1, vocab_size=9, ends=[2, 5])


def test_a_head_of_another_target_is_refused(config, tmp_path):
    other = save_tiny_target(tmp_path / "other", seed=5)
    config.head = str(save_tiny_run(tmp_path / "run", other))
    with pytest.raises(ValueError, match="was trained for another target"):
        build_token_map(config)


def test_share_of_nothing_is_zero():
    assert share(torch.zeros(4), torch.tensor([1])) == 0.0
