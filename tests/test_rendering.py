import time
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from data.chats.conversations import Conversation, Counts, Turn
from data.chats.prompts import prompt_ids
from data.chats.rendering import TokenSequence, render, render_all
from data.chats.split import stem
from tests.templates import (
    CHATML,
    END,
    EOS,
    MARKERS,
    OTHER_END_IN_HISTORY,
    TEMPLATES,
    THINKING,
    THOUGHT_ONLY_WHEN_SERVED,
    byte_level,
    metaspace,
)

LONG = 100_000
TOKENIZERS = {
    "bytes": lambda template: byte_level(template, merges=False),
    "merges": lambda template: byte_level(template, merges=True),
    "trimmed_offsets": lambda template: byte_level(template, merges=True, trim_offsets=True),
    "swallowed_space": lambda template: byte_level(template, merges=True, rstrip=True),
    "metaspace": metaspace,
}


def chat(*texts: str, system: str | None = None) -> Conversation:
    """User and assistant in turn."""
    turns = [Turn("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)]
    return Conversation("chat_0", tuple([Turn("system", system)] * (system is not None) + turns))


CHATS = {
    "same_replies": chat(
        "Yes?", "Yes.", "Yes.", "Yes.", "no", "Yes.", "Yes.\n", "Yes.", "a", "Yes."
    ),
    "reply_quotes_the_question": chat("say the cat", "say the cat", "the", "say the cat sits"),
    "one_word": chat("a", "b"),
    "system": chat("the cat", "sits", "on", "the mat", system="Be kind to the cat."),
    "role_markers_as_text": chat(
        "USER: a ASSISTANT: b", "ASSISTANT: user\nassistant\n[/INST]", "c", "d"
    ),
    "many_bytes": chat("你好，🙂", "🙂é́ 世界", "e\u0301", "Ωμέγα 👩‍👩‍👧"),
}


def supervised(tokenizer, sequence: TokenSequence) -> list[str]:
    """The text of each stretch of supervised tokens."""
    pairs = zip(sequence.input_ids, sequence.loss_mask, strict=True)
    stretches = [[i for i, _ in group] for flag, group in groupby(pairs, lambda p: p[1]) if flag]
    return [tokenizer.decode(ids) for ids in stretches]


def replies(conversation: Conversation, *, trim: bool) -> list[str]:
    texts = [turn.text for turn in conversation.turns if turn.role == "assistant"]
    return [text.strip() for text in texts] if trim else texts


@pytest.mark.parametrize("conversation", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_supervised_text_is_each_reply_and_its_end_of_turn_token(name, kind, conversation):
    tokenizer = TOKENIZERS[kind](TEMPLATES[name])
    (sequence,) = render(tokenizer, conversation, max_length=LONG)
    before, end = {
        "llama2": (" ", " " + EOS),
        "mistral_v3": (" ", EOS),
        "mistral": ("", EOS),
        "vicuna": (" ", EOS),
    }.get(name, ("", END))
    expected = [before + text + end for text in replies(conversation, trim=False)]
    assert supervised(tokenizer, sequence) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_the_template_applied_at_once(name):
    tokenizer = byte_level(TEMPLATES[name], merges=True)
    conversation = CHATS["same_replies"]
    messages = [{"role": t.role, "content": t.text} for t in conversation.turns]
    (sequence,) = render(tokenizer, conversation, max_length=LONG)
    assert sequence.input_ids == tokenizer.apply_chat_template(messages, return_dict=False)


@pytest.mark.parametrize("kind", ["bytes", "merges", "trimmed_offsets", "metaspace"])
@pytest.mark.parametrize("reply", ["\nYes.", "\n\nYes.", "  Yes.", " \n the", "(the mat)"])
def test_what_comes_before_a_reply_is_what_a_server_is_given(kind, reply):
    """Tokenised at once, the line end of the header and that of the reply are one token."""
    tokenizer = TOKENIZERS[kind](CHATML)
    conversation = chat("the cat", reply)
    (sequence,) = render(tokenizer, conversation, max_length=LONG)
    prompt = prompt_ids(tokenizer, [{"role": "user", "content": "the cat"}])
    assert sequence.input_ids[: len(prompt)] == prompt
    assert sequence.loss_mask.index(True) == len(prompt)
    assert supervised(tokenizer, sequence) == [reply + END]


@pytest.mark.parametrize("reply", ["👩", "👩 the cat", "👍", "世", "≠≠", "e\u0301", "\u0301"])
def test_reply_that_begins_within_a_token_keeps_its_first_character_whole(reply):
    """A space and the first bytes of an emoji can be one token, its other bytes the next one."""
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    tokenizer = byte_level(template, merges=True)
    conversation = chat("the cat", reply, "no", reply)
    (sequence,) = render(tokenizer, conversation, max_length=LONG)
    assert supervised(tokenizer, sequence) == [reply + EOS] * 2
    assert tokenizer.decode(sequence.input_ids) == "".join(
        f"{turn.role}: {turn.text}{EOS}" for turn in conversation.turns
    )


def test_template_that_trims_is_followed():
    tokenizer = byte_level(TEMPLATES["llama3"], merges=True)
    conversation = chat(" \n the cat ", "\n\nsits\n", "\non\n", " the mat ")
    (sequence,) = render(tokenizer, conversation, max_length=LONG)
    assert supervised(tokenizer, sequence) == ["sits" + END, "the mat" + END]


@pytest.mark.parametrize("kind", ["bytes", "merges", "trimmed_offsets", "metaspace"])
@pytest.mark.parametrize("marker", MARKERS)
def test_control_token_in_a_turn_stays_text(kind, marker):
    tokenizer = TOKENIZERS[kind](TEMPLATES["llama3"])
    texts = [f"what is {marker}?", f"{marker} ends{marker}{marker}", f"{marker}", f"a{marker}b"]
    counts = Counts()
    (sequence,) = render_all(tokenizer, [chat(*texts)], max_length=LONG, counts=counts)
    (harmless,) = render(tokenizer, chat("what", "ends", "is", "a"), max_length=LONG)
    control = set(tokenizer.convert_tokens_to_ids(MARKERS))
    assert [i for i in sequence.input_ids if i in control] == [
        i for i in harmless.input_ids if i in control
    ]
    assert supervised(tokenizer, sequence) == [texts[1] + END, texts[3] + END]
    assert counts.mended["control token in the text spelled out"] == 1


def test_chat_whose_control_token_cannot_be_spelled_out_is_dropped_and_counted():
    """A tokenizer without a token for each byte has none for each character of its markers."""
    tokenizer = metaspace(TEMPLATES["mistral"], all_bytes=False)
    counts = Counts(read=2)
    chats = [chat("a", f"the {EOS} cat"), chat("a", "the cat")]
    sequences = list(render_all(tokenizer, chats, max_length=LONG, counts=counts))
    assert len(sequences) == 1
    assert counts.used == 1
    assert "control token" in next(iter(counts.dropped))


hostile = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"], exclude_characters="\0"),
        st.sampled_from("\n \t<|>[]/:\ue000\ue001"),
    ),
    min_size=1,
    max_size=12,
)
fragments = st.lists(
    st.one_of(hostile, st.sampled_from([*MARKERS, "assistant\n", "Yes.", "[/INST]", "\n\n"])),
    min_size=1,
    max_size=4,
).map("".join)


@pytest.mark.parametrize("name", ["chatml", "llama3", "llama2", "gemma", "phi3", "vicuna"])
@pytest.mark.parametrize("kind", ["bytes", "merges", "trimmed_offsets", "metaspace"])
def test_no_text_moves_the_mask(name, kind):
    tokenizer = TOKENIZERS[kind](TEMPLATES[name])
    trim = name in ("llama3", "llama2", "gemma")
    before = {"llama2": " ", "vicuna": " "}.get(name, "")
    end = {"llama2": " " + EOS, "vicuna": EOS}.get(name, END)

    @settings(max_examples=40, deadline=None)
    @given(st.lists(fragments.filter(str.strip), min_size=4, max_size=4))
    def check(texts):
        conversation = chat(*texts)
        (sequence,) = render(tokenizer, conversation, max_length=LONG)
        expected = [before + text + end for text in replies(conversation, trim=trim)]
        assert supervised(tokenizer, sequence) == expected
        ids_and_mask = (sequence.input_ids, sequence.loss_mask)
        unsupervised = [i for i, m in zip(*ids_and_mask, strict=True) if not m]
        for text in texts[::2]:
            assert (text.strip() if trim else text) in tokenizer.decode(unsupervised)

    check()


@pytest.mark.parametrize("name", TEMPLATES)
def test_cut_sequence_is_the_beginning_of_the_whole_one(name):
    tokenizer = byte_level(TEMPLATES[name], merges=True)
    conversation = chat(*["the cat sits on the mat"] * 40)
    (whole,) = render(tokenizer, conversation, max_length=LONG)
    first = whole.loss_mask.index(True)
    near, last = range(first + 20, first + 24), len(whole.input_ids) - 1
    for max_length in (first + 2, first + 3, *near, 300, last):
        (cut,) = render(tokenizer, conversation, max_length=max_length)
        assert cut.input_ids == whole.input_ids[:max_length]
        assert cut.loss_mask == whole.loss_mask[:max_length]


def test_chat_without_a_reply_in_reach_is_dropped_and_counted():
    counts = Counts(read=2)
    chats = [chat("the cat " * 50, "sits"), chat("the", "cat")]
    tokenizer = byte_level(CHATML, merges=False)
    sequences = list(render_all(tokenizer, chats, max_length=60, counts=counts))
    assert [len(sequences), counts.used] == [1, 1]
    assert counts.dropped == {"no reply within max_length": 1}


@pytest.mark.parametrize("chars_per_token", [0, 1, 3, 1000])
def test_reading_only_the_first_turns_of_long_chats_changes_nothing(monkeypatch, chars_per_token):
    tokenizer = byte_level(CHATML, merges=True)
    chats = [chat(*["the cat sits on the mat " * (i + 1)] * 10) for i in range(6)]
    expected = [s for c in chats for s in render(tokenizer, c, max_length=200)]
    monkeypatch.setattr("data.chats.rendering.CHARS_PER_TOKEN", chars_per_token)
    counts = Counts()
    assert list(render_all(tokenizer, chats, max_length=200, counts=counts)) == expected
    assert counts.mended == {"cut to max_length": 4}  # two are short


def test_turns_out_of_reach_cost_no_time():
    """The template is tried on each number of turns, which for 2,000 of them took half a minute."""
    tokenizer = byte_level(CHATML, merges=True)
    texts = ["the cat"] * 2000
    began = time.monotonic()
    (sequence,) = render(tokenizer, chat(*texts), max_length=200)
    assert time.monotonic() - began < 5
    assert [sequence] == render(tokenizer, chat(*texts[:100]), max_length=200)


@pytest.mark.parametrize("name", ["mistral", "gemma", "phi3"])
def test_system_turn_joins_the_user_where_the_template_has_no_place_for_it(name):
    tokenizer = byte_level(TEMPLATES[name], merges=True)
    counts = Counts()
    conversation = chat("the cat", "sits", system="Be kind.")
    (sequence,) = render_all(tokenizer, [conversation], max_length=LONG, counts=counts)
    (joined,) = render(tokenizer, chat("Be kind.\n\nthe cat", "sits"), max_length=LONG)
    assert sequence == joined
    assert counts.mended.total() == 1


def test_template_that_rewrites_history_gives_a_sequence_for_each_reply():
    tokenizer = byte_level(THINKING, merges=True)
    answers = ["<think>\nthe cat\n</think>\n\nyes", "<think>\nthe mat\n</think>\n\nno"]
    conversation = chat("a", answers[0], "b", answers[1])
    first, second = render(tokenizer, conversation, max_length=LONG)
    assert supervised(tokenizer, first) == [answers[0] + END]
    assert supervised(tokenizer, second) == [answers[1] + END]
    assert "the cat" not in tokenizer.decode(second.input_ids)  # as a server would have it
    assert first.id != second.id
    assert stem(first.id) == stem(second.id) == stem(conversation.id)


def test_other_end_token_in_history_gives_a_sequence_for_each_reply():
    tokenizer = byte_level(OTHER_END_IN_HISTORY, merges=True)
    sequences = render(tokenizer, chat("a", "yes", "b", "no"), max_length=LONG)
    assert [supervised(tokenizer, s) for s in sequences] == [["yes" + EOS], ["no" + EOS]]


def test_end_of_turn_need_not_be_a_special_token():
    tokenizer = byte_level(CHATML, merges=True, special=False)
    (sequence,) = render(tokenizer, chat("a <|end|>", "yes<|end|>b"), max_length=LONG)
    assert supervised(tokenizer, sequence) == ["yes<|end|>b<|end|>"]
    assert sequence.input_ids.count(tokenizer.convert_tokens_to_ids(END)) == 2


def test_thoughts_that_only_the_template_adds_are_not_supervised():
    tokenizer = byte_level(THINKING, merges=True)
    sequences = render(tokenizer, chat("a", "yes", "b", "no"), max_length=LONG)
    assert [supervised(tokenizer, s) for s in sequences] == [["yes" + END], ["no" + END]]


def test_thought_in_an_earlier_reply_does_not_make_the_template_s_own_supervised():
    tokenizer = byte_level(THINKING, merges=True)
    texts = ["a", "<think>\nthe cat\n</think>\n\nyes", "b", "no", "c", " the mat\n"]
    sequences = render(tokenizer, chat(*texts), max_length=LONG)
    expected = [[text + END] for text in texts[1::2]]
    assert [supervised(tokenizer, sequence) for sequence in sequences] == expected


def test_template_whose_replies_are_not_what_is_generated_is_refused_by_name():
    tokenizer = byte_level(THOUGHT_ONLY_WHEN_SERVED, merges=True)
    tokenizer.name_or_path = "org/thinker"
    with pytest.raises(ValueError, match="chat template of 'org/thinker' ends a prompt with"):
        render(tokenizer, chat("a", "yes"), max_length=LONG)


@pytest.mark.parametrize(
    "template",
    ["{% for m in messages %}{{ m.role }}{% endfor %}", "{{ messages[-1].content }}"],
)
def test_template_that_leaves_turns_out_is_refused_by_name(template):
    tokenizer = byte_level(template, merges=True)
    tokenizer.name_or_path = "org/odd"
    with pytest.raises(ValueError, match="chat template of 'org/odd' does not write each"):
        render(tokenizer, chat("a", "yes"), max_length=LONG)


def test_missing_template_is_refused():
    with pytest.raises(ValueError, match="has no chat template"):
        render(byte_level("", merges=True), chat("a", "yes"), max_length=LONG)


def test_template_may_be_changed_between_calls():
    tokenizer = byte_level(CHATML, merges=True)
    render(tokenizer, chat("a", "yes"), max_length=LONG)
    tokenizer.chat_template = TEMPLATES["mistral"]
    (sequence,) = render(tokenizer, chat("a", "yes"), max_length=LONG)
    assert supervised(tokenizer, sequence) == ["yes" + EOS]


def test_many_chats_give_what_each_gives_alone():
    tokenizer = byte_level(CHATML, merges=True)
    chats = [chat("the cat " * (i % 7 + 1), "sits " * (i % 5 + 1)) for i in range(150)]
    together = list(render_all(tokenizer, chats, max_length=40, counts=Counts()))
    assert together == [s for c in chats for s in render(tokenizer, c, max_length=40)]


def test_bos_is_there_once_with_a_tokenizer_that_adds_one():
    tokenizer = byte_level(TEMPLATES["llama3"], merges=True)
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    assert tokenizer("a").input_ids.count(bos) == 1
    (sequence,) = render(tokenizer, chat("a", "yes"), max_length=LONG)
    prompt = prompt_ids(tokenizer, [{"role": "user", "content": "a"}])
    assert sequence.input_ids.count(bos) == prompt.count(bos) == 1
    assert sequence.input_ids[0] == prompt[0] == bos
