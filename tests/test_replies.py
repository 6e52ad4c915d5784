"""Which replies are kept: those that the dump shows as they were generated, and no others."""

import json

import pytest

from data.chats.conversations import Conversation, Counts, Turn, read_conversations
from data.chats.rendering import render
from data.config import DatasetConfig
from data.replies.rules import (
    BLANK,
    LONG,
    NO_ROOM,
    NOT_REPRODUCED,
    Answer,
    Chat,
    end_token,
    replies_in,
    reply_seed,
)
from tests.templates import (
    OTHER_END_IN_HISTORY,
    TEMPLATES,
    THINKING,
    THOUGHT_ONLY_WHEN_SERVED,
    byte_level,
    metaspace,
)

SIZES = dict(max_new_tokens=100, max_length=1000)
TOKENIZERS = {
    "bytes": lambda template: byte_level(template, merges=False),
    "merges": lambda template: byte_level(template, merges=True),
    "metaspace": metaspace,
}
NO_PROMPT = "no_generation_prompt"  # the target would have to write the role marker itself
KEEPING = {name: text for name, text in TEMPLATES.items() if name != NO_PROMPT}
KEEPING |= {"thinking": THINKING, "other_end_in_history": OTHER_END_IN_HISTORY}
# That pair tokenises the end of a prompt alone otherwise than before a reply, and is refused.
PAIRS = [(name, kind) for name in KEEPING for kind in TOKENIZERS]
PAIRS.remove(("llama3", "merges"))
NO_THOUGHT = "<think>\n\n</think>\n\nYes."
THOUGHT = "<think>\nthe cat\n</think>\n\nYes."


def conversation(*texts: str) -> Conversation:
    roles = ("user", "assistant") * len(texts)
    return Conversation("c", tuple(Turn(r, t) for r, t in zip(roles, texts, strict=False)))


def chat(tokenizer, *texts: str, **sizes) -> Chat:
    return Chat(conversation(*texts), tokenizer, **{**SIZES, **sizes})


def generated(tokenizer, *texts: str) -> list[list[int]]:
    """The tokens of each reply, as a target would generate them."""
    return list(replies_in(render(tokenizer, conversation(*texts), max_length=1000)))


@pytest.fixture(scope="module")
def chatml():
    return byte_level(TEMPLATES["chatml"], merges=True)


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_what_is_kept_is_dumped_as_the_tokens_that_were_generated(name, kind, tmp_path):
    tokenizer = TOKENIZERS[kind](KEEPING[name])
    # A thinking target writes a thought each time, be it empty.
    first, last = (NO_THOUGHT, THOUGHT) if name == "thinking" else ("Yes.", "the mat")
    texts = ("the cat", first, "no", THOUGHT, "sits", last)
    expected = generated(tokenizer, *texts)
    writing = chat(tokenizer, *texts)
    while not writing.is_done:
        ids = expected[writing.number]
        reply = writing.judge(Answer(tokenizer.decode(ids[:-1]), ids))
        assert (reply.problem, reply.tokens, reply.checked) == (None, len(ids), True)
        turns = [*writing.turns, Turn("assistant", reply.text)]
        writing.go_on(reply)

    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"id": "c", "messages": messages}))
    read = read_conversations(DatasetConfig(path=str(tmp_path / "chats.jsonl")), Counts())
    dumped = [replies_in(render(tokenizer, each, max_length=1000)) for each in read]
    assert [list(replies) for replies in dumped] == [expected]


def test_thoughts_are_stored_and_given_back():
    tokenizer = byte_level(THINKING, merges=True)
    ids = generated(tokenizer, "the cat", THOUGHT)[0]
    reply = chat(tokenizer, "the cat", "").judge(Answer(tokenizer.decode(ids[:-1]), ids))
    assert reply.text == THOUGHT
    without = tokenizer("Yes.").input_ids + ids[-1:]  # the template writes an empty thought
    assert chat(tokenizer, "a", "").judge(Answer("Yes.", without)).problem == NOT_REPRODUCED


@pytest.mark.parametrize(
    ("template", "text", "spelled"),
    [
        ("chatml", "the cat", ["t", "h", "e", " ", "c", "a", "t", "<|end|>"]),  # otherwise
        ("chatml", "yes", ["yes", "</s>"]),  # ended by another token
        ("chatml", "yes", ["yes"]),  # not ended
        ("chatml", "yes<|start|>", ["yes", "<|start|>", "<|end|>"]),  # a control token
        ("chatml", "yes\0", ["yes", "\0", "<|end|>"]),  # the reader removes it
        ("chatml", "yes�", None),  # half a character
        ("gemma", "yes\n", ["yes", "\n", "<|end|>"]),  # trimmed
    ],
)
def test_what_the_template_does_not_reproduce_is_left_out(template, text, spelled):
    tokenizer = byte_level(TEMPLATES[template], merges=True)
    ids = [id for part in spelled or () for id in tokenizer(part).input_ids]
    if spelled is None:  # the first byte of a longer character
        ids = [*tokenizer("yesé").input_ids[:-1], tokenizer.convert_tokens_to_ids("<|end|>")]
    assert tokenizer.decode(ids).startswith(text)
    reply = chat(tokenizer, "the cat", "").judge(Answer(text, ids))
    assert (reply.problem, reply.text, reply.checked) == (NOT_REPRODUCED, "", False)


def test_a_control_token_in_a_question_ends_the_chat(chatml):
    """A server feeds it as the token that it is, the dump spells it out: other features."""
    ids = generated(chatml, "the cat", "yes")[0]
    assert chat(chatml, "the cat", "").judge(Answer("yes", ids)).problem is None
    assert chat(chatml, "a<|end|>b", "").judge(Answer("yes", ids)).problem == NOT_REPRODUCED


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_blank_reply_is_left_out(text, chatml):
    assert chat(chatml, "a", "").judge(Answer(text, chatml("<|end|>").input_ids)).problem == BLANK


def test_a_reply_without_token_ids_is_compared_as_text():
    tokenizer = byte_level(TEMPLATES["gemma"], merges=True)
    kept = chat(tokenizer, "the cat", "").judge(Answer("yes", tokens=2))
    assert (kept.problem, kept.text, kept.tokens, kept.checked) == (None, "yes", 2, False)
    trimmed = chat(tokenizer, "the cat", "").judge(Answer("yes\n", tokens=2))
    assert trimmed.problem == NOT_REPRODUCED
    vicuna = byte_level(TEMPLATES["vicuna"], merges=True)  # it writes the space by itself
    assert chat(vicuna, "the cat", "").judge(Answer(" yes", tokens=2)).text == "yes"


def test_a_reply_that_was_cut_names_the_limit_that_cut_it(chatml):
    long = chat(chatml, "a", "", max_new_tokens=10)
    assert (long.room, long.judge(long.cut(10)).problem) == (10, LONG)
    full = chat(chatml, "a", "", max_length=len(long.prompt) + 5, max_new_tokens=10)
    assert (full.room, full.judge(full.cut(5)).problem) == (5, NO_ROOM)


def test_a_chat_goes_on_from_its_own_answers_and_ends_at_a_problem(chatml):
    writing = chat(chatml, "the cat", "old", "no", "old", "sits", "old")
    assert writing.messages == [{"role": "user", "content": "the cat"}]
    ids = generated(chatml, "the cat", "yes")[0]
    assert writing.go_on(writing.judge(Answer("yes", ids))) == 1
    assert [m["content"] for m in writing.messages] == ["the cat", "yes", "no"]
    assert writing.go_on(writing.judge(Answer(problem=NO_ROOM))) == 2  # the last one goes as well
    assert writing.is_done


def test_a_system_turn_is_sent_as_the_template_takes_it():
    turns = (Turn("system", "Be kind."), Turn("user", "the cat"), Turn("assistant", "yes"))
    for name, roles in (("chatml", ["system", "user"]), ("gemma", ["user"])):
        tokenizer = byte_level(TEMPLATES[name], merges=True)
        sent = Chat(Conversation("c", turns), tokenizer, **SIZES).messages
        assert [message["role"] for message in sent] == roles
        assert "Be kind." in sent[0]["content"]


def test_the_end_token_is_the_templates_own(chatml):
    assert chatml.convert_ids_to_tokens(end_token(chatml)) == "<|end|>"


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_level(TEMPLATES["chatml"].replace("<|end|>", ""), merges=True),  # replies do not end
        byte_level(TEMPLATES[NO_PROMPT], merges=True),
        byte_level(TEMPLATES["llama3"], merges=True),  # line ends at a prompt's end are merged
    ],
    ids=["endless", "no_prompt", "merged"],
)
def test_a_template_that_gives_no_reply_back_is_refused(tokenizer):
    with pytest.raises(ValueError, match="does not give a reply back as it was generated"):
        end_token(tokenizer)


def test_a_template_that_opens_a_thought_only_when_served_is_refused():
    with pytest.raises(ValueError, match="not what a server generates"):
        end_token(byte_level(THOUGHT_ONLY_WHEN_SERVED, merges=True))


def test_seeds_differ_by_run_chat_and_number():
    seeds = {reply_seed(s, c, n) for s in range(9) for c in ("a", "b", "1:a") for n in range(9)}
    assert len(seeds) == 9 * 3 * 9
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert reply_seed(1, "a", 2) == reply_seed(1, "a", 2)
