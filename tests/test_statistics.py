"""Figures of tokens, and the bounds beyond which a dump refuses them."""

import json
import logging
import random
from collections import Counter
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
import torch

from data.cache import supervised_pairs
from data.config import DatasetConfig, DumpConfig, TargetConfig
from data.conversations import Conversation, Turn
from data.dump import dump
from data.plan import read_plan, read_tokens
from data.plausible import check_plausible, implausible
from data.rendering import render
from data.statistics import PIECE, Statistics, measure, pieces, reply_spans, summary, table
from data.template import control_tokens
from data.tokens import Tokens
from tests.kill_dump import small_dump
from tests.templates import OTHER_END_IN_HISTORY, TEMPLATES, THINKING, byte_level, metaspace
from tests.tiny import CHAT_TEMPLATE, save_tiny_target, tiny_chats, tiny_tokenizer

END = 2  # the end-of-turn token of the hand-made sequences
Sequence = list[tuple[int, bool]]  # token and whether it is supervised


def tokens_of(sequences: list[Sequence]) -> Tokens:
    flat = [pair for sequence in sequences for pair in sequence]
    return Tokens(
        torch.tensor([token for token, _ in flat], dtype=torch.int32),
        torch.tensor([is_reply for _, is_reply in flat], dtype=torch.bool),
        torch.tensor([0, *map(len, sequences)]).cumsum(0),
    )


def figures(*parts: Tokens, max_length: int = 50) -> Statistics:
    return measure(parts, max_length=max_length, end_tokens={END}, spell=str)


def random_sequences(rng: random.Random, count: int) -> list[Sequence]:
    """Replies anywhere: at the very begin and end too, and of one token."""
    return [
        [(rng.randrange(9), rng.random() < 0.6) for _ in range(rng.randint(1, 50))]
        for _ in range(count)
    ]


def chats(
    count: int = 30, *, prompt: int = 6, reply: int = 8, end: int = END, word: int | None = None
) -> list[Sequence]:
    """Sequences of one exchange, all different."""
    rng = random.Random(0)
    return [
        [(rng.randrange(10, 1000), False) for _ in range(prompt)]
        + [(word or rng.randrange(10, 1000), True) for _ in range(reply)]
        + [(end, True)]
        for _ in range(count)
    ]


def test_figures_are_those_of_a_plain_count():
    rng = random.Random(0)
    sequences = random_sequences(rng, 200) + random_sequences(rng, 3)[:1] * 5
    found = figures(tokens_of(sequences))
    replies, each, cut, shares = [], [], 0, []
    for sequence in sequences:
        runs = [list(group) for is_reply, group in groupby(sequence, lambda p: p[1]) if is_reply]
        replies += runs
        each.append(len(runs))
        shares.append(round(sum(map(len, runs)) / len(sequence) * 1000))
        is_at_end = bool(runs) and sequence[-1][1] and sequence[-1][0] != END
        cut += is_at_end and len(sequence) == 50
    words = Counter(token for run in replies for token, _ in run)
    lengths = [len(sequence) for sequence in sequences]
    assert cut and sum(length == 50 for length in lengths) > cut

    assert found.sequences == 205
    assert found.distinct == len({tuple(sequence) for sequence in sequences}) == 201
    assert found.tokens == sum(lengths)
    assert found.supervised == sum(words.values())
    assert found.pairs == sum(
        int(supervised_pairs(torch.tensor([flag for _, flag in s])).sum()) for s in sequences
    )
    assert found.at_max_length == lengths.count(50)
    assert found.replies == len(replies)
    assert found.cut_replies == cut
    assert found.ended_replies == sum(run[-1][0] == END for run in replies)
    assert found.ended_share == found.ended_replies / (len(replies) - cut)
    assert (found.top_token, found.top_count) == words.most_common(1)[0]
    assert found.top_text == f"[{found.top_token}]"
    assert found.histogram == [
        sum(low <= length <= high for length in lengths)
        for low, high in ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64))
    ]
    for spread, numbers, unit in (
        (found.lengths, lengths, 1),
        (found.shares, shares, 10),
        (found.replies_each, each, 1),
        (found.reply_lengths, [len(run) for run in replies], 1),
    ):
        quantiles = np.percentile(numbers, [0, 5, 50, 95, 100], method="inverted_cdf") / unit
        got = [spread.min, spread.p5, spread.median, spread.p95, spread.max]
        assert got == pytest.approx(quantiles.tolist())
        assert spread.mean == pytest.approx(np.mean(numbers) / unit, abs=0.06)


def test_figures_do_not_depend_on_how_the_tokens_are_cut_into_pieces():
    rng = random.Random(1)
    sequences = random_sequences(rng, 60)
    whole = figures(tokens_of(sequences))
    for _ in range(5):
        cuts = sorted(rng.sample(range(1, 60), 7))
        parts = [sequences[a:b] for a, b in zip([0, *cuts], [*cuts, 60], strict=True)]
        assert figures(*map(tokens_of, parts)) == whole


def test_pieces_are_whole_sequences_and_no_copies():
    lengths = [PIECE // 2, PIECE // 2, 5, PIECE + 9, 7, PIECE - 1]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    tokens = Tokens(
        torch.arange(offsets[-1], dtype=torch.int32), torch.ones(int(offsets[-1])).bool(), offsets
    )
    parts = list(pieces(tokens))
    assert [part.lengths.tolist() for part in parts] == [
        [PIECE // 2, PIECE // 2],
        [5],
        [PIECE + 9],
        [7],
        [PIECE - 1],
    ]
    assert torch.equal(torch.cat([part.input_ids for part in parts]), tokens.input_ids)
    assert sum(len(part.loss_mask) for part in parts) == len(tokens.loss_mask)
    assert all(part.offsets[0] == 0 for part in parts)
    storage = tokens.input_ids.untyped_storage().data_ptr()
    assert all(part.input_ids.untyped_storage().data_ptr() == storage for part in parts)


def test_a_reply_does_not_go_on_in_the_next_sequence():
    first, last = reply_spans(torch.tensor([0, 1, 1, 1, 0, 1]).bool(), torch.tensor([0, 2, 3, 6]))
    assert first.tolist() == [1, 2, 3, 5]
    assert last.tolist() == [1, 2, 3, 5]


def test_nothing_supervised_cannot_be_measured():
    with pytest.raises(ValueError, match=r"Nothing is supervised"):
        figures(tokens_of([[(5, False)] * 3]))
    with pytest.raises(ValueError, match=r"Nothing is supervised"):
        figures()


def test_the_table_says_what_was_counted():
    cut = [(7, False)] * 5 + [(8, True)] * 5
    whole = [(7, False), (5, True), (6, True), (END, True)]
    found = figures(tokens_of([whole, whole, whole, cut]), max_length=10)
    lines = table(found).splitlines()
    assert lines == [
        "sequences                      4   2 of them different",
        "at max_length                  1   25.0% of the sequences",
        "tokens                        22",
        "supervised tokens             14   63.6% of the tokens",
        "supervised pairs              10   what the loss counts: no reply's first token",
        "replies                        4   1 of them cut off by max_length",
        "  ended                        3   100.0% of those not cut off have an end-of-turn token",
        "top token                      5   '[8]', 35.7% of replies",
        "",
        "                              min      5 %   median     mean     95 %      max",
        "tokens of a sequence            4        4        4      5.5       10       10",
        "supervised, %                50.0     50.0     75.0     68.8     75.0     75.0",
        "replies of a sequence           1        1        1      1.0        1        1",
        "tokens of a reply               3        3        3      3.5        5        5",
        "",
        "tokens of a sequence",
        "        3 to       4         3  75.0%  " + "█" * 30,
        "        5 to       8         0   0.0%",
        "        9 to      10         1  25.0%  " + "█" * 10,
    ]
    assert summary(found) == (
        "lengths: 4 to 10 tokens, median 4; 25.0% of the sequences at max_length\n"
        "mask: 63.6% of the tokens supervised; of a sequence, median 75.0 %, nine in ten between "
        "50.0 and 75.0 %\n"
        "replies: 4, median 3 tokens; 100.0% of those not cut off have an end-of-turn token"
    )


# --- bounds ------------------------------------------------------------------------------------

FAULTS = {
    "prompts_far_longer_than_replies": (
        chats(prompt=900, reply=4),
        chats(prompt=400, reply=4),
        r"0.55% of the tokens are supervised, expected at least 1%",
    ),
    "mask_of_all_ones": (
        chats(prompt=0, reply=40),
        chats(prompt=2, reply=400),  # a share of 99.5 % is that of a short question
        r"0.0 tokens a reply are not supervised, expected at least 2",
    ),
    "mask_of_all_but_the_first": (
        chats(prompt=1, reply=40),
        chats(prompt=2, reply=40),
        r"1.0 tokens a reply are not supervised",
    ),
    "no_end_of_turn_token": (
        chats(end=9),
        chats(end=9, count=20) + chats(count=20),
        r"0.0% of the replies that are not cut off end with an end-of-turn token",
    ),
    "prompts_up_to_max_length": (
        [sequence[:1000] for sequence in chats(prompt=980, reply=40)],
        [sequence[:1000] for sequence in chats(prompt=880, reply=140)],
        r"100% of the sequences reach max_length=1000 and 2.0% of their tokens are supervised",
    ),
    "a_label_as_reply": (
        chats(reply=1),
        chats(reply=2),
        r"the median reply has 2 tokens with its end, expected at least 3",
    ),
    "the_same_chats_again_and_again": (
        chats(3) * 11,
        chats(3) * 10,
        r"3 of 33 sequences differ, expected at least 10%",
    ),
    "one_token_only": (
        chats(reply=8, word=5),
        chats(reply=8, word=5, count=10) + chats(reply=8, count=10),
        r"token 5 \('\[5\]'\) is 89% of the supervised tokens, expected at most 50%",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_with_figure_and_bound_and_only_beyond_it(fault):
    wrong, right, message = FAULTS[fault]
    statistics = figures(tokens_of(wrong), max_length=1000)
    with pytest.raises(ValueError, match=message) as error:
        check_plausible(statistics, DatasetConfig(path="chats.json"))
    text = str(error.value)
    assert text.startswith("The tokens of chats.json look wrong:\n  - ")
    assert len(text.splitlines()) == 3  # no other fault is blamed
    assert "python -m scripts.preview_data" in text and "dataset.allow_implausible=true" in text
    assert list(implausible(figures(tokens_of(right), max_length=1000))) == []


def test_few_sequences_are_not_judged():
    statistics = figures(tokens_of(chats(end=9)))
    assert list(implausible(replace(statistics, sequences=20)))
    assert not list(implausible(replace(statistics, sequences=19)))


def test_replies_that_are_all_cut_off_are_not_blamed_for_their_missing_end():
    statistics = figures(tokens_of([s[:-1] for s in chats(reply=44)]))
    assert statistics.cut_replies == statistics.replies == 30
    assert list(implausible(statistics)) == []
    for text in (table(statistics), summary(statistics)):
        assert "nan" not in text and "all of them are cut off by max_length" in text


def test_what_is_allowed_is_a_warning_with_the_same_text(caplog):
    statistics = figures(tokens_of(chats(3) * 11))
    with pytest.raises(ValueError) as error:
        check_plausible(statistics, DatasetConfig(path="a.json"))
    check_plausible(statistics, DatasetConfig(path="a.json", allow_implausible=True))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    fault = str(error.value).splitlines()[1]
    assert fault in record.getMessage()


ALL_TEMPLATES = {**TEMPLATES, "thinking": THINKING, "other_end": OTHER_END_IN_HISTORY}


@pytest.mark.parametrize("kind", ["bytes", "merges", "metaspace"])
@pytest.mark.parametrize("name", ALL_TEMPLATES)
def test_honest_chats_of_any_template_look_right(name, kind):
    template = ALL_TEMPLATES[name]
    make = {
        "bytes": lambda: byte_level(template, merges=False),
        "merges": lambda: byte_level(template, merges=True),
        "metaspace": lambda: metaspace(template),
    }
    tokenizer = make[kind]()
    sequences = []
    for record in tiny_chats(24):
        roles = {"human": "user", "gpt": "assistant"}
        turns = [Turn(roles[turn["from"]], turn["value"]) for turn in record["conversations"]]
        for s in render(tokenizer, Conversation(record["id"], tuple(turns)), max_length=400):
            sequences.append(list(zip(s.input_ids, s.loss_mask, strict=True)))
    statistics = measure(
        [tokens_of(sequences)],
        max_length=400,
        end_tokens=control_tokens(tokenizer),
        spell=tokenizer.decode,
    )
    assert statistics.ended_replies == statistics.replies
    assert list(implausible(statistics)) == []


# --- in the dump -------------------------------------------------------------------------------


def test_the_plan_keeps_the_figures_of_its_tokens(cache_path, caplog):
    plan = read_plan(cache_path)
    statistics = measure(
        pieces(read_tokens(cache_path, plan)),
        max_length=2048,
        end_tokens=control_tokens(tiny_tokenizer()),
        spell=tiny_tokenizer().decode,
    )
    assert plan.statistics == json.loads(json.dumps(statistics, default=vars))
    assert plan.statistics["ended_replies"] == plan.statistics["replies"] > 24
    assert plan.statistics["pairs"] == plan.num_supervised


def test_a_dump_of_one_chat_again_and_again_is_refused_unless_allowed(
    target_path, tmp_path, caplog
):
    file = tmp_path / "chats.json"
    file.write_text(json.dumps([{**tiny_chats(1)[0], "id": f"a{i}"} for i in range(20)]))
    config = small_dump(str(target_path), str(file), tmp_path / "cache")
    with pytest.raises(ValueError, match=r"1 of 20 sequences differ"):
        dump(config)
    assert not (tmp_path / "cache" / "plan.json").exists()

    config.dataset.allow_implausible = True
    with caplog.at_level(logging.INFO):
        out = dump(config)
    assert "1 of 20 sequences differ" in caplog.text
    assert "100.0% of those not cut off have an end-of-turn token" in caplog.text
    assert read_plan(out).statistics["distinct"] == 1


def test_a_template_without_an_end_of_turn_token_is_refused(chats_path, tmp_path):
    target = save_tiny_target(tmp_path / "target")
    without = CHAT_TEMPLATE.replace("<|im_end|>\n{% endfor", "\n\n{% endfor")
    tiny_tokenizer(without).save_pretrained(target)
    config = DumpConfig(
        target=TargetConfig(path=str(target), device="cpu"),
        dataset=DatasetConfig(path=str(chats_path)),
        out=str(tmp_path / "cache"),
    )
    with pytest.raises(ValueError, match=r"0.0% of the replies .* The chat template writes none"):
        dump(config)
