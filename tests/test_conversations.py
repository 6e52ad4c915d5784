import json
from pathlib import Path

import pytest

from data.chats.conversations import Conversation, Counts, read_conversations
from data.chats.split import stem
from data.config import DatasetConfig

GOOD = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]


def turns(*pairs: tuple[str, object]) -> list[dict]:
    return [{"from": speaker, "value": value} for speaker, value in pairs]


def record(conversations, name="a_0") -> dict:
    return {"id": name, "conversations": conversations}


def read(file: Path, text: str | bytes, **config) -> tuple[list[Conversation], Counts]:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    counts = Counts()
    config = {"max_dropped": 1.0, **config}
    return list(read_conversations(DatasetConfig(path=str(file), **config), counts)), counts


def read_one(tmp_path, *pairs) -> tuple[list[tuple[str, str]], Counts]:
    """What becomes of one chat that stands beside a good one."""
    chats = json.dumps([record(GOOD, "good"), record(turns(*pairs))])
    conversations, counts = read(tmp_path / "chats.json", chats)
    return [(t.role, t.text) for c in conversations[1:] for t in c.turns], counts


MENDED = {
    "blank turn": (
        [("human", "a"), ("gpt", "b"), ("human", " \n"), ("gpt", "c")],
        [("user", "a"), ("assistant", "b\n\nc")],
    ),
    "same role twice in a row": (
        [("human", "a"), ("user", "b"), ("gpt", "c")],
        [("user", "a\n\nb"), ("assistant", "c")],
    ),
    "reply first": (
        [("gpt", "a"), ("human", "b"), ("gpt", "c")],
        [("user", "b"), ("assistant", "c")],
    ),
    "no reply to the last turn": (
        [("human", "a"), ("gpt", "b"), ("human", "c")],
        [("user", "a"), ("assistant", "b")],
    ),
    "cut off before the speaker 'tool'": (
        [("human", "a"), ("gpt", "b"), ("human", "c"), ("tool", "d"), ("gpt", "e")],
        [("user", "a"), ("assistant", "b")],
    ),
    "cut off before a turn that is null": (
        [("human", "a"), ("gpt", "b"), ("human", None), ("gpt", "e")],
        [("user", "a"), ("assistant", "b")],
    ),
    "cut off before a turn that is a number": (
        [("human", "a"), ("gpt", "b"), ("human", 5), ("gpt", "e")],
        [("user", "a"), ("assistant", "b")],
    ),
    "cut off before a turn with parts that are not text": (
        [("human", "a"), ("gpt", "b"), ("human", [{"type": "image"}, "c"]), ("gpt", "e")],
        [("user", "a"), ("assistant", "b")],
    ),
    "cut off before a later system turn": (
        [("human", "a"), ("gpt", "b"), ("system", "s"), ("human", "c"), ("gpt", "e")],
        [("user", "a"), ("assistant", "b")],
    ),
    "NUL or invalid Unicode in the text": (
        [("human", "a\0b"), ("gpt", "c\ud83dd")],
        [("user", "ab"), ("assistant", "c\ufffdd")],
    ),
}


@pytest.mark.parametrize("reason", MENDED)
def test_mended_turns_alternate_and_are_counted(tmp_path, reason):
    given, expected = MENDED[reason]
    found, counts = read_one(tmp_path, *given)
    assert found == expected
    assert counts.mended[reason] == 1
    assert counts.examples[reason] == ["a_0"]
    assert [counts.read, counts.used, counts.dropped.total()] == [2, 2, 0]


DROPPED = {
    "empty conversation": [],
    "no user turn with a reply": [("gpt", "a"), ("gpt", "b")],
    "no user turn with a reply: cut off before a turn that is null": [("human", None)],
}


@pytest.mark.parametrize("reason", DROPPED)
def test_chat_of_which_nothing_is_left_is_dropped_and_counted(tmp_path, reason):
    found, counts = read_one(tmp_path, *DROPPED[reason])
    assert not found
    assert counts.dropped == {reason: 1}
    assert [counts.read, counts.used] == [2, 1]


@pytest.mark.parametrize("pairs", [[("human", "a")], [("human", ""), ("gpt", " ")], [("gpt", "a")]])
def test_chat_without_a_reply_to_a_user_is_dropped(tmp_path, pairs):
    found, counts = read_one(tmp_path, *pairs)
    assert not found
    assert counts.dropped == {"no user turn with a reply": 1}


def test_system_turn_comes_first_and_stays(tmp_path):
    pairs = [("system", "s"), ("gpt", "a"), ("human", "b"), ("gpt", "c")]
    found, _ = read_one(tmp_path, *pairs)
    assert found == [("system", "s"), ("user", "b"), ("assistant", "c")]


def test_list_of_text_parts_is_their_text(tmp_path):
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    found, counts = read_one(tmp_path, ("human", parts), ("bing", "c"))
    assert found == [("user", "a b"), ("assistant", "c")]
    assert not counts.mended


@pytest.mark.parametrize(
    "bad", [[], "text", 5, None, {}, {"text": "a"}, {"conversations": "a"}, {"messages": None}]
)
def test_record_of_another_shape_is_dropped_and_counted(tmp_path, bad):
    conversations, counts = read(tmp_path / "a.json", json.dumps([record(GOOD), bad]))
    assert [c.id for c in conversations] == ["a_0"]
    assert counts.dropped.total() == 1


def test_both_dialects_give_the_same(tmp_path):
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    mixed = [record(GOOD), {"id": "a_0", "messages": messages}, {"id": 7, "messages": GOOD}]
    conversations, counts = read(tmp_path / "a.json", json.dumps(mixed))
    assert len({c.turns for c in conversations}) == 1
    assert [c.id for c in conversations] == ["a_0", "a_0~2", "7"]
    assert counts.mended == {"repeated id": 1}


def test_ids_are_unique_and_repeats_keep_the_stem(tmp_path):
    names = ["a_0", "a_0", "a_0~2", "a_0", "b", "b", "b_~2", None, None]
    chats = [record(GOOD, name) for name in names]
    conversations, _ = read(tmp_path / "a.json", json.dumps(chats))
    ids = [c.id for c in conversations]
    assert len(set(ids)) == len(names)
    assert [stem(i) for i in ids] == [*"aaaabbb", "record 8", "record 9"]


NAMES = {  # id -> what it becomes, and the reason if it is not the given one
    '"a_0"': ("a_0", None),
    '" a "': (" a ", None),
    "7": ("7", None),
    "-7": ("-7", None),
    "7.0": ("7", None),
    "1e3": ("1000", None),
    "7.5": ("record 1", "id that is a number"),
    "Infinity": ("record 1", "id that is a number"),
    "true": ("record 1", "id that is a truth value"),
    '["a"]': ("record 1", "id that is a list"),
    '{"a": 1}': ("record 1", "id that is an object"),
    '" "': ("record 1", "id that is blank"),
    '""': ("record 1", "no id"),
    "null": ("record 1", "no id"),
    "NaN": ("record 1", "no id"),
}


@pytest.mark.parametrize("given", NAMES)
def test_ids_of_all_kinds_have_a_rule_and_are_counted(tmp_path, given):
    expected, reason = NAMES[given]
    text = f'[{{"id": {given}, "conversations": {json.dumps(GOOD)}}}]'
    [conversation], counts = read(tmp_path / "a.json", text)
    assert conversation.id == expected
    assert counts.mended == ({reason: 1} if reason else {})


def test_ids_of_all_kinds_may_stand_in_one_file(tmp_path):
    records = [record(GOOD, json.loads(name)) for name in NAMES]
    records += [record(GOOD, "7"), {"conversations": GOOD}]
    conversations, counts = read(tmp_path / "a.json", json.dumps(records))
    assert len({c.id for c in conversations}) == len(records)
    assert [c.id for c in conversations if stem(c.id) == "7"] == ["7", "7_~2", "7_~3"]
    assert counts.mended["no id"] == 4
    assert counts.mended["repeated id"] == 2


def test_a_thousand_speakers_are_not_a_thousand_reasons(tmp_path):
    chats = [record(turns(("human", "a"), (f"{i} {'name ' * 99}", "b"))) for i in range(1000)]
    _, counts = read(tmp_path / "a.json", json.dumps([*chats, record(GOOD)]))
    assert counts.dropped.total() == 1000
    assert counts.dropped["other reasons"] > 900
    assert len(counts.summary()) < 10_000


def test_record_with_many_keys_is_shown_shortly(tmp_path):
    wide = {f"key {i}": i for i in range(10_000)}
    _, counts = read(tmp_path / "a.json", json.dumps([wide, record(GOOD)]))
    assert "'key 0' (a number)" in counts.summary()
    assert "and 9,994 more" in counts.summary()
    assert len(counts.summary()) < 1000


LAYOUTS = {
    "array": lambda chats: json.dumps(chats),
    "indented array": lambda chats: json.dumps(chats, indent=4),
    "array with a last comma": lambda chats: json.dumps(chats)[:-1] + ",\n]\n",
    "lines": lambda chats: "\n".join(map(json.dumps, chats)),
    "lines with blank ones": lambda chats: "\n\n" + "\r\n \n".join(map(json.dumps, chats)) + "\n",
    "not escaped": lambda chats: json.dumps(chats, ensure_ascii=False),
}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_is_seen_from_the_content(tmp_path, layout, name, encoding):
    chats = [record(turns(("human", "é🙂 [{\u2028"), ("gpt", '}]"\\')), f"{i}") for i in range(5)]
    conversations, _ = read(tmp_path / name, LAYOUTS[layout](chats).encode(encoding))
    assert [c.id for c in conversations] == list("01234")
    assert {c.turns[0].text for c in conversations} == {"é🙂 [{\u2028"}
    assert {c.turns[1].text for c in conversations} == {'}]"\\'}


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_chunks_change_nothing(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr("data.chats.records.CHUNK", chunk)
    chats = [record(turns(("human", f"é🙂\\ {i}"), ("gpt", '"\n' * i + "x"))) for i in range(9)]
    chats = [{"score": -1.25e-7, "kept": [True, None, 12]} | chat for chat in chats]
    conversations, _ = read(tmp_path / "a.json", json.dumps(chats, indent=1))
    assert [c.turns[0].text for c in conversations] == [f"é🙂\\ {i}" for i in range(9)]
    assert [c.turns[1].text for c in conversations] == ['"\n' * i + "x" for i in range(9)]


def test_bytes_that_are_not_utf8_are_replaced(tmp_path):
    text = json.dumps([record(turns(("human", "a?"), ("gpt", "b")))]).encode()
    conversations, counts = read(tmp_path / "a.json", text.replace(b"a?", b"a\xff"))
    assert conversations[0].turns[0].text == "a\ufffd"
    assert counts.mended == {"NUL or invalid Unicode in the text": 1}


@pytest.mark.parametrize("layout", ["array", "indented array", "lines"])
def test_cut_off_file_is_an_error_that_names_the_record_or_gives_what_is_whole(tmp_path, layout):
    chats = [record(GOOD, name) for name in "abc"]
    whole = LAYOUTS[layout](chats)
    start = whole.rindex("{", 0, whole.rindex('"conversations"'))
    for length in range(start + 1, whole.rindex("}")):
        text = whole[:length]
        with pytest.raises(ValueError, match=r"(?is)a\.json.*record 3.*cut off|record 3.*a\.json"):
            read(tmp_path / "a.json", text)
        conversations, _ = read(tmp_path / "a.json", text, allow_truncated=True)
        assert [c.id for c in conversations] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"a": 1}, {"b": }]', r"Record 2 of the array in .*a\.json is not JSON"),
        ('[{"a": 1} {"b": 2}]', r"Record 1 of the array in .*a\.json is followed by '{'"),
        ('[{"a": 1}]\n[{"b": 2}]', r"a\.json ends after 1 records, but '\[' follows"),
        ('{"a": 1}\n{"b": \n', r"a\.json:2 \(record 2\) is not JSON"),
        ("id,text\n1,hello\n", r"a\.json:1 \(record 1\) is not JSON.*Expected a JSON array"),
        ("\n", r"a\.json holds no records"),
        ("[]", r"a\.json holds no records"),
    ],
)
def test_file_that_is_not_json_is_an_error_that_says_where(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a.json", text, allow_truncated=True)


def test_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        next(read_conversations(DatasetConfig(path="none.json"), Counts()))


def test_too_many_dropped_records_are_an_error_with_reasons_and_examples(tmp_path):
    text = json.dumps([record(GOOD, "a"), *({"prompt": "x", "id": f"p{i}"} for i in range(3))])
    with pytest.raises(
        ValueError, match=r"(?s)75%.*no list .*p0 has 'prompt' \(a text\), 'id' .*\"messages\""
    ):
        read(tmp_path / "a.json", text, max_dropped=0.5)
    conversations, _ = read(tmp_path / "a.json", text, max_dropped=0.75)
    assert len(conversations) == 1


def test_no_usable_record_is_an_error_whatever_may_be_dropped(tmp_path):
    with pytest.raises(ValueError, match=r"100%.*cannot be used"):
        read(tmp_path / "a.json", json.dumps([[GOOD], [GOOD]]), max_dropped=1.0)


def test_limit_counts_usable_chats_and_reads_no_further(tmp_path):
    text = json.dumps([record([]), *(record(GOOD, f"c{i}") for i in range(4))])[:-20]
    conversations, counts = read(tmp_path / "a.json", text, limit=2)
    assert [c.id for c in conversations] == ["c0", "c1"]
    assert [counts.read, counts.used] == [3, 2]


def test_counts_can_be_written_and_read_by_people(tmp_path):
    _, counts = read(tmp_path / "a.json", json.dumps([record(GOOD), record(GOOD), record([])]))
    assert json.loads(json.dumps(counts.to_json())) == {
        "read": 3,
        "used": 2,
        "dropped": {"empty conversation": 1},
        "mended": {"repeated id": 1},
        "examples": {"empty conversation": ["a_0"], "repeated id": ["a_0"]},
    }
    assert counts.summary().splitlines()[0] == "2 of 3 conversations used"
    assert "1  empty conversation  (a_0)" in counts.summary()
