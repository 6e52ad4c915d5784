import pytest

from data.split import is_heldout, stem, with_suffix

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
