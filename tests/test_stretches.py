"""A sequence as text: nothing is lost or added, and the edges of the mask are where they are."""

import re
from functools import cache
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from data.chats.conversations import Conversation, Turn
from data.chats.rendering import render
from data.chats.stretches import Stretch, as_html, as_text, shorten, stretches
from data.chats.template import control_tokens
from tests.pages import Page
from tests.templates import CHATML, END, EOS, MARKERS, TEMPLATES, THINKING, byte_level, metaspace


def dropped_space(template: str):
    """As Llama 2 decodes: the space that opens a text is left out."""
    tokenizer = metaspace(template)
    decoder = [tokenizer.backend_tokenizer.decoder, decoders.Strip(" ", left=1, right=0)]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(decoder)
    return tokenizer


TOKENIZERS = {
    "bytes": lambda template: byte_level(template, merges=False),
    "merges": lambda template: byte_level(template, merges=True),
    "trimmed_offsets": lambda template: byte_level(template, merges=True, trim_offsets=True),
    "metaspace": metaspace,
    "dropped_space": dropped_space,
}


def chat(*texts: str, system: str | None = None) -> Conversation:
    """User and assistant in turn."""
    turns = [Turn("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)]
    return Conversation("chat_0", tuple([Turn("system", system)] * (system is not None) + turns))


def joined(parts: list[Stretch], kind: str) -> list[str]:
    """The text of each run of stretches of one kind."""
    runs = [(k, list(group)) for k, group in groupby(parts, lambda part: part.kind)]
    return ["".join(part.text for part in run) for k, run in runs if k == kind]


def uncolored(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


CHATS = [
    chat("the cat", "sits", "on", "the mat\n\nYes."),
    chat("\n\nYes?", "\n\nYes.", "\nno\n", "\nno\n"),  # tokens reach over the edges of turns
    chat("你好，🙂", "🙂é́ 世界", "e\u0301", "Ωμέγα 👩‍👩‍👧"),
    chat(f"what is {END}?", f"{EOS} is {END}", "[INST]", "assistant\n"),
]


@pytest.mark.parametrize("conversation", CHATS, ids=lambda c: ascii(c.turns[0].text))
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_stretches_are_the_decoded_sequence_and_its_mask(name, kind, conversation):
    tokenizer = TOKENIZERS[kind](TEMPLATES[name])
    (sequence,) = render(tokenizer, conversation, max_length=10_000)
    parts = stretches(tokenizer, sequence, conversation)
    assert "".join(part.text for part in parts) == tokenizer.decode(sequence.input_ids)
    runs = groupby(zip(sequence.input_ids, sequence.loss_mask, strict=True), lambda p: p[1])
    # Each reply is decoded alone here, by a tokenizer that drops nothing.
    alone = TOKENIZERS["metaspace" if kind == "dropped_space" else kind](TEMPLATES[name])
    replies = [alone.decode([id for id, _ in run]) for is_reply, run in runs if is_reply]
    assert joined(parts, "supervised") == replies


@pytest.mark.parametrize("conversation", CHATS, ids=lambda c: ascii(c.turns[0].text))
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", ["chatml", "smollm2", "llama3", "gemma"])
def test_what_users_say_is_told_from_the_frame(name, kind, conversation):
    tokenizer = TOKENIZERS[kind](TEMPLATES[name])
    (sequence,) = render(tokenizer, conversation, max_length=10_000)
    parts = stretches(tokenizer, sequence, conversation)
    said = [turn.text for turn in conversation.turns if turn.role == "user"]
    # A token that reaches from the frame into a turn, white space always, counts as the turn's.
    assert [text.strip() for text in joined(parts, "turn")] == [text.strip() for text in said]


def test_a_system_turn_without_a_place_is_found_in_the_users():
    tokenizer = byte_level(TEMPLATES["gemma"], merges=False)
    conversation = chat("the cat", "sits", system="Be kind.")
    (sequence,) = render(tokenizer, conversation, max_length=10_000)
    parts = stretches(tokenizer, sequence, conversation)
    assert joined(parts, "turn") == ["Be kind.\n\nthe cat"]


def test_a_control_token_is_told_from_text_that_reads_like_it():
    tokenizer = byte_level(CHATML, merges=True)
    conversation = chat(f"what is {END}?", f"a {END} b")
    (sequence,) = render(tokenizer, conversation, max_length=10_000)
    parts = stretches(tokenizer, sequence, conversation)
    assert [part for part in parts if part.kind == "supervised"] == [
        Stretch(f"a {END} b", "supervised"),
        Stretch(END, "supervised", is_control=True),
    ]
    assert [part.text for part in parts if part.is_control and part.kind == "frame"] == [
        "<|start|>",
        END,
        "<|start|>",
    ]
    assert [part.text for part in parts if part.is_control and part.kind == "turn"] == []


def test_each_reply_of_a_template_that_rewrites_history_is_a_sequence_of_its_own():
    tokenizer = byte_level(THINKING, merges=False)
    conversation = chat("a?", "Yes.", "b?", "No.")
    parts = [
        stretches(tokenizer, sequence, conversation)
        for sequence in render(tokenizer, conversation, max_length=10_000)
    ]
    empty = "<think>\n\n</think>\n\n"
    assert [joined(part, "supervised") for part in parts] == [[f"Yes.{END}"], [f"No.{END}"]]
    assert [joined(part, "turn") for part in parts] == [["a?"], ["a?", "Yes.", "b?"]]
    assert joined(parts[1], "frame")[-2].endswith(f"assistant\n{empty}")


def test_where_the_template_changed_a_turn_only_replies_are_told_apart():
    tokenizer = byte_level(THINKING, merges=False)
    conversation = chat("a?", "<think>\nhm\n</think>\n\nYes.", "b?", "No.")
    _, sequence = render(tokenizer, conversation, max_length=10_000)
    parts = stretches(tokenizer, sequence, conversation)
    assert {part.kind for part in parts} == {"turn", "supervised"}
    assert "".join(part.text for part in parts) == tokenizer.decode(sequence.input_ids)


# --- text and page -----------------------------------------------------------------------------

PARTS = [
    Stretch("<s>", "frame", is_control=True),
    Stretch("[INST] ", "frame"),
    Stretch("Hi <b>\n", "turn"),
    Stretch(" [/INST]", "frame"),
    Stretch(" Yes.\nNo.", "supervised"),
    Stretch("</s>", "supervised", is_control=True),
]


def test_without_colour_marks_enclose_what_is_supervised_with_its_end():
    assert as_text(PARTS, color=False) == "<s>[INST] Hi <b>\n [/INST]⟦ Yes.\nNo.</s>⟧"


def test_a_mark_in_the_text_is_escaped():
    parts = [Stretch("⟦a⟧", "turn"), Stretch("⟧b", "supervised")]
    assert as_text(parts, color=False) == "\\⟦a\\⟧⟦\\⟧b⟧"


def test_in_colour_every_line_is_painted_and_supervised_line_ends_show():
    frame, control, end = "\x1b[2m", "\x1b[2;4m", "\x1b[0m"
    green, green_control = "\x1b[30;42m", "\x1b[30;42;4m"
    assert as_text(PARTS, color=True) == (
        f"{control}<s>{end}{frame}[INST] {end}Hi <b>\n{frame} [/INST]{end}"
        f"{green} Yes.↵{end}\n{green}No.{end}{green_control}</s>{end}"
    )


@pytest.mark.parametrize("color", [True, False])
@pytest.mark.parametrize("kind", ["supervised", "turn", "frame"])
def test_no_text_can_steer_the_terminal(color, kind):
    hostile = "".join(map(chr, [*range(32), *range(0x7F, 0xA0), 0x2028, 0x202E, 0x2066])) + "a"
    text = as_text([Stretch(hostile, kind)], color=color)
    left = {c for c in uncolored(text) if ord(c) < 32 or 0x7F <= ord(c) < 0xA0}
    assert left == {"\n", "\t"}
    assert not set(text) & {"\u2028", "\u202e", "\u2066"}
    assert "␛" in text and "<U+202E>" in text and "<U+009B>" in text


def test_the_page_holds_the_same_stretches_and_nothing_of_a_text_becomes_markup():
    hostile = "</span></pre><script>alert('x')</script>&lt;&amp;\"\n"
    parts = [*PARTS, Stretch(hostile, "turn")]
    page = Page()
    page.feed(as_html(parts))
    assert page.tags == {"span"}
    assert page.pieces == [
        ("frame control", "<s>"),
        ("frame", "[INST] "),
        ("turn", "Hi <b>\n"),
        ("frame", " [/INST]"),
        ("supervised", " Yes.↵\nNo."),
        ("supervised control", "</s>"),
        ("turn", hostile),
    ]


@settings(derandomize=True, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(["turn", "supervised"]), st.integers(1, 3000)), max_size=30),
    st.integers(100, 3000),
)
def test_what_is_cut_out_is_stated_to_the_character(lengths, max_chars):
    parts = [Stretch("x" * length, kind) for kind, length in lengths]
    shown = shorten(parts, max_chars)
    kept = sum(len(part.text) for part in shown if part.kind != "cut")
    notes = [
        int(re.search(r"[\d,]+", p.text)[0].replace(",", "")) for p in shown if p.kind == "cut"
    ]
    assert kept + sum(notes) == sum(length for _, length in lengths)
    assert kept <= max_chars + max_chars // 4 * 1.5
    assert shorten(parts, None) == parts


def test_the_edges_of_a_long_stretch_stay():
    parts = [Stretch("begin" + "x" * 5000 + "end", "turn"), Stretch("Yes.</s>", "supervised")]
    text = as_text(shorten(parts, 400), color=False)
    assert text == f"begin{'x' * 45} … 4,908 more characters … {'x' * 47}end⟦Yes.</s>⟧"
    tail = [Stretch("a" * 300, "supervised")] * 7
    assert as_text(shorten(tail, 100), color=False).endswith("a⟧… 600 more characters")


def test_every_marker_is_a_control_token_of_the_templates():
    """The tests above rely on it."""
    tokenizer = byte_level(CHATML, merges=False)
    assert {tokenizer.convert_tokens_to_ids(m) for m in MARKERS} <= control_tokens(tokenizer)


@cache
def tokenizer_of(kind: str, name: str):
    return TOKENIZERS[kind](TEMPLATES[name])


hostile = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6),
        st.sampled_from([*MARKERS, "\n", "\n\n", "  ", "assistant\n", "🙂", "e\u0301", "[/INST]"]),
    ),
    min_size=1,
    max_size=6,
).map("".join)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    st.lists(hostile.filter(str.strip), min_size=2, max_size=4).filter(lambda t: len(t) % 2 == 0),
    st.sampled_from([30, 10_000]),
)
def test_nothing_is_lost_or_added_whatever_the_text_and_wherever_it_is_cut(texts, max_length):
    conversation = chat(*texts)
    for name in ("smollm2", "llama2", "llama3", "vicuna"):
        for kind in TOKENIZERS:
            tokenizer = tokenizer_of(kind, name)
            for sequence in render(tokenizer, conversation, max_length=max_length):
                parts = stretches(tokenizer, sequence, conversation)
                whole = tokenizer.decode(sequence.input_ids)
                assert "".join(part.text for part in parts) == whole
                assert all(part.text for part in parts)
