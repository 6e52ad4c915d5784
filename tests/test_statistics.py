"""Figures of tokens: equal to a plain count, however they are cut into pieces."""

import json
import random
from collections import Counter
from itertools import groupby

import numpy as np
import pytest
import torch

from data.cache.reader import supervised_pairs
from data.chats.statistics import PIECE, measure, pieces, reply_spans, summary, table
from data.chats.template import control_tokens
from data.chats.tokens import Tokens
from data.dump.plan import read_plan, read_tokens
from tests.sequences import END, Sequence, figures, tokens_of
from tests.tiny import tiny_tokenizer


def random_sequences(rng: random.Random, count: int) -> list[Sequence]:
    """Replies anywhere: at the very begin and end too, and of one token."""
    return [
        [(rng.randrange(9), rng.random() < 0.6) for _ in range(min(rng.randint(1, 60), 50))]
        for _ in range(count)
    ]


def test_figures_are_those_of_a_plain_count():
    rng = random.Random(0)
    sequences = random_sequences(rng, 200) + random_sequences(rng, 3)[:1] * 5
    found = figures(tokens_of(sequences))
    replies, each, shares = [], [], []
    at_end = Counter()  # replies up to max_length, by whether they are ended
    for sequence in sequences:
        runs = [list(group) for is_reply, group in groupby(sequence, lambda p: p[1]) if is_reply]
        replies += runs
        each.append(len(runs))
        shares.append(round(sum(map(len, runs)) / len(sequence) * 1000))
        if len(sequence) == 50 and sequence[-1][1]:
            at_end[sequence[-1][0] == END] += 1
    words = Counter(token for run in replies for token, _ in run)
    lengths = [len(sequence) for sequence in sequences]
    cut = at_end[False]
    assert at_end[True] and at_end[False] and lengths.count(50) > at_end.total()

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
        "at max_length                  1   25.0 % of the sequences",
        "tokens                        22",
        "supervised tokens             14   63.6 % of the tokens",
        "supervised pairs              10   what the loss counts: no reply's first token",
        "replies                        4   1 of them cut off by max_length",
        "  ended                        3   100.0 % of those not cut off have an end-of-turn token",
        "top token                      5   '[8]', 35.7 % of replies",
        "",
        "                              min      5 %   median     mean     95 %      max",
        "tokens of a sequence            4        4        4      5.5       10       10",
        "supervised, %                50.0     50.0     75.0     68.8     75.0     75.0",
        "replies of a sequence           1        1        1      1.0        1        1",
        "tokens of a reply               3        3        3      3.5        5        5",
        "",
        "tokens of a sequence",
        "        3 to       4         3   75.0 %  " + "█" * 30,
        "        5 to       8         0    0.0 %",
        "        9 to      10         1   25.0 %  " + "█" * 10,
    ]
    assert summary(found) == (
        "lengths: 4 to 10 tokens, median 4; 25.0 % of the sequences at max_length\n"
        "mask: 63.6 % of the tokens supervised; of a sequence, median 75.0 %, nine in ten between "
        "50.0 and 75.0 %\n"
        "ends: of 4 replies, median 3 tokens, 100.0 % of those not cut off have an end-of-turn "
        "token"
    )


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
