import json
import logging
import re
from itertools import product

import pytest

from data.cache.reader import FeatureCache
from data.chats.split import is_heldout, stem, with_suffix
from data.config import DatasetConfig, DumpConfig, TargetConfig
from data.dump.run import dump
from tests.tiny import tiny_chats
from train.config import HeldoutConfig, TrainConfig
from train.fit.loop import fit
from train.fit.plan import chats_of, split_cache

IDS = [f"chat{i}_{part}" for i in range(2000) for part in (0, 7)]


def test_parts_of_one_chat_stay_on_one_side():
    for first, second in zip(IDS[::2], IDS[1::2], strict=True):
        assert is_heldout(first, share=0.3, seed=1) == is_heldout(second, share=0.3, seed=1)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 1.0])
def test_share_of_chats_is_held_out(share):
    held_out = sum(is_heldout(name, share=share, seed=0) for name in IDS)
    assert held_out / len(IDS) == pytest.approx(share, abs=0.03 if 0 < share < 1 else 0)


def test_larger_share_holds_out_the_same_chats_and_more():
    small = {name for name in IDS if is_heldout(name, share=0.05, seed=0)}
    large = {name for name in IDS if is_heldout(name, share=0.2, seed=0)}
    assert small and small < large


def test_seed_chooses_other_chats():
    assert [is_heldout(i, share=0.5, seed=0) for i in IDS] != [
        is_heldout(i, share=0.5, seed=1) for i in IDS
    ]


def test_split_is_the_same_in_every_process_and_version():
    """Python's own hash() of a text differs from process to process."""
    assert [i for i in IDS if is_heldout(i, share=0.002, seed=0)] == HELD_OUT


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("QWJhYvA_0", "QWJhYvA"),
        ("QWJhYvA_593", "QWJhYvA"),
        ("a_b_7", "a_b"),
        ("a_7~2", "a"),
        ("a_~2", "a"),
        ("chat_000123", "chat_000123"),
        ("train_48211", "train_48211"),
        ("conv_5f3a", "conv_5f3a"),
        ("a_b~c", "a_b~c"),
        ("7", "7"),
        ("_7", "_7"),
    ],
)
def test_only_a_part_number_is_left_out_of_the_stem(name, expected):
    """Once all ids of a data set that end in other words had one stem, and were on one side."""
    assert stem(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "QWJhYvA_0",
        "plain",
        "a_b_c",
        "_lead",
        "trail_",
        "_",
        "_5",
        "a_b~c",
        "a_0~2",
        "x_1~y_2",
        "a\n_3",
        "a_1234",
    ],
)
def test_suffix_makes_another_id_of_the_same_stem(name):
    other = with_suffix(name, "2")
    assert other != name
    assert stem(other) == stem(name)


@pytest.fixture(scope="module")
def parts(tmp_path_factory, target_path) -> FeatureCache:
    """A cache of 12 chats in 3 parts each, the parts far from each other."""
    folder = tmp_path_factory.mktemp("parts")
    chats = tiny_chats(36)
    for chat, (part, name) in zip(chats, product(range(3), range(12)), strict=True):
        chat["id"] = f"chat{name}_{part}"
    (folder / "chats.json").write_text(json.dumps(chats))
    config = DumpConfig(
        target=TargetConfig(path=str(target_path)),
        dataset=DatasetConfig(path=str(folder / "chats.json")),
        out=str(folder / "features"),
    )
    return FeatureCache(dump(config))


@pytest.mark.parametrize("seed", range(5))
def test_training_and_held_out_sequences_share_no_chat(parts, seed):
    heldout = HeldoutConfig(share=0.3, max_tokens=None)
    config = TrainConfig(features=str(parts.path), out="none", seed=seed, heldout=heldout)
    training, held_out = split_cache(parts, config)
    assert sorted(training + held_out) == list(range(36))
    assert not {parts.ids[i].split("_")[0] for i in training} & {
        parts.ids[i].split("_")[0] for i in held_out
    }
    assert len(training) == 3 * len(chats_of(parts, training))


def test_run_says_how_many_chats_are_on_each_side_and_that_none_is_on_both(parts, tmp_path, caplog):
    config = TrainConfig(
        features=str(parts.path),
        out=str(tmp_path / "run"),
        max_steps=1,
        heldout=HeldoutConfig(share=0.3),
    )
    training, held_out = split_cache(parts, config)
    with caplog.at_level(logging.INFO):
        fit(config)
    numbers = re.search(
        r"data: (\d+) sequences of (\d+) chats .* (\d+) of (\d+) held out, overlap (\d+)",
        caplog.text,
    )
    assert numbers
    expected = [len(training), len(training) // 3, len(held_out), len(held_out) // 3, 0]
    assert list(map(int, numbers.groups())) == expected


def test_data_set_whose_ids_are_all_parts_of_one_chat_is_refused_with_the_reason(parts, tmp_path):
    """`identity_0` … `identity_99` looks like one chat in 100 parts, and cannot be split."""
    heldout = HeldoutConfig(share=1e-9)
    config = TrainConfig(features=str(parts.path), out=str(tmp_path / "run"), heldout=heldout)
    with pytest.raises(ValueError, match=r"36 sequences .* they are parts of 12 chats \(ids alike"):
        split_cache(parts, config)


HELD_OUT = [
    "chat389_0",
    "chat389_7",
    "chat530_0",
    "chat530_7",
    "chat625_0",
    "chat625_7",
    "chat985_0",
    "chat985_7",
    "chat1153_0",
    "chat1153_7",
]
