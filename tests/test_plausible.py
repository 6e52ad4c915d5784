"""What a dump refuses as implausible, and that it refuses nothing else."""

import json
import logging
import random
from dataclasses import replace

import pytest

from data.chats.conversations import Conversation, Turn
from data.chats.plausible import check_plausible, implausible
from data.chats.rendering import render
from data.chats.statistics import measure, summary, table
from data.chats.template import control_tokens
from data.config import DatasetConfig, DumpConfig, TargetConfig
from data.dump.plan import read_plan
from data.dump.run import dump
from tests.kill_dump import small_dump
from tests.sequences import END, Sequence, figures, tokens_of
from tests.templates import OTHER_END_IN_HISTORY, TEMPLATES, THINKING, byte_level, metaspace
from tests.tiny import CHAT_TEMPLATE, save_tiny_target, tiny_chats, tiny_tokenizer


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


FAULTS = {
    "prompts_far_longer_than_replies": (
        chats(prompt=900, reply=4),
        chats(prompt=400, reply=4),
        r"0.55 % of the tokens are supervised, expected at least 1 %",
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
        r"0.0 % of the replies that are not cut off end with an end-of-turn token",
    ),
    "prompts_up_to_max_length": (
        [sequence[:1000] for sequence in chats(prompt=980, reply=40)],
        [sequence[:1000] for sequence in chats(prompt=880, reply=140)],
        r"100 % of the sequences reach max_length=1000 and 2.0 % of their tokens are supervised",
    ),
    "a_label_as_reply": (
        chats(reply=1),
        chats(reply=2),
        r"the median reply has 2 tokens with its end, expected at least 3",
    ),
    "the_same_chats_again_and_again": (
        chats(3) * 11,
        chats(3) * 10,
        r"3 of 33 sequences differ, expected at least 10 %",
    ),
    "one_token_only": (
        chats(reply=8, word=5),
        chats(reply=8, word=5, count=10) + chats(reply=8, count=10),
        r"token 5 \('\[5\]'\) is 89 % of the supervised tokens, expected at most 50 %",
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
    assert "100.0 % of those not cut off have an end-of-turn token" in caplog.text
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
    with pytest.raises(ValueError, match=r"0.0 % of the replies .* The chat template writes none"):
        dump(config)
