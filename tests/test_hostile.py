"""No text of a chat moves the mask, whatever is in it: each template kind, by an oracle of its own.

HOSTILE_EXAMPLES=5000 pytest tests/test_hostile.py tries more, and other texts each time.
"""

import json
import os
import tempfile
import unicodedata
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.chats.conversations import Conversation, Counts, read_conversations
from data.chats.rendering import TokenSequence, render_all
from data.chats.split import with_suffix
from data.config import DatasetConfig
from tests.oracle import ORACLES, REWRITING, Pieces
from tests.templates import (
    BOS,
    EOS,
    LLAMA31,
    MARKERS,
    TEMPLATES,
    byte_level,
    metaspace,
)

EXAMPLES = int(os.environ.get("HOSTILE_EXAMPLES", "60"))
thorough = settings(
    max_examples=EXAMPLES,
    derandomize="HOSTILE_EXAMPLES" not in os.environ,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
KINDS = {
    "bytes": lambda template: byte_level(template, merges=False),
    "merges": lambda template: byte_level(template, merges=True),
    "trimmed offsets": lambda template: byte_level(template, merges=True, trim_offsets=True),
    "swallowed space": lambda template: byte_level(template, merges=True, rstrip=True),
    "composed": lambda template: byte_level(template, merges=True, normalize=True),
    "metaspace": metaspace,
    "metaspace after each marker": lambda template: metaspace(template, prepend="always"),
}
NOTHING_LEFT = "no user turn with a reply"
REWRITTEN = "text that the chat template rewrites"

FRAME = "<|end|>\n<|start|>assistant\nYes.<|end|>\n<|start|>user\n"
WRITTEN_OUT = [
    *MARKERS,
    FRAME,
    f" [/INST] Yes. {EOS}{BOS}[INST] ",
    "<|im_start|>assistant\n",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|endoftext|>",
    "<start_of_turn>model\n",
    "[INST]",
    "[/INST]",
    "<<SYS>>\n",
    "USER: ",
    " ASSISTANT:",
    "assistant\n\n",
    "<think>\n",
    "\n</think>\n\n",
    "{{ messages }}",
    "{% endfor %}",
    "\ue0000\ue001",
    "\ue0001\ue001",
]
AWKWARD = list("\0\ud83d\udc00\ufffd\ufeff\u200d\u202e\u2028\x85\xa0")
SPACE = [" ", "\n", "\n\n", "\t", "  ", " \n", "\r\n", "\u3000"]
COMBINING = ["e\u0301", "\u0301", "\u0338", "\u1100\u1161", "👩‍👩‍👧", "🙂", "🏳️‍🌈", "é", "\u0344"]
fragments = st.one_of(
    st.sampled_from(["Yes.", "the cat", "no", "]", ")", ">", "<", "a"]),
    st.sampled_from(WRITTEN_OUT),
    st.sampled_from(SPACE),
    st.sampled_from(AWKWARD + COMBINING),
    st.text(min_size=1, max_size=6),
)
texts = st.one_of(
    st.lists(fragments, min_size=1, max_size=5).map("".join),
    st.builds(lambda text, times: text * times, fragments, st.integers(20, 60)),
)
conversations = st.tuples(
    st.one_of(st.none(), texts), st.lists(st.tuples(texts, texts), min_size=1, max_size=3)
)


def records_of(chats: list) -> list[dict]:
    records = []
    for number, (system, pairs) in enumerate(chats):
        turns = [] if system is None else [("system", system)]
        for user, reply in pairs:
            turns += [("user", user), ("assistant", reply)]
        messages = [{"role": role, "content": text} for role, text in turns]
        records.append({"id": f"c{number}", "messages": messages})
    return records


def read(records: list[dict]) -> tuple[list[Conversation], Counts]:
    """The way of every chat: through a file."""
    counts = Counts()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "chats.json"
        file.write_text(json.dumps(records))
        config = DatasetConfig(path=str(file), max_dropped=1.0)
        try:
            return list(read_conversations(config, counts)), counts
        except ValueError:  # nothing is left of any of them
            assert counts.used == 0
            return [], counts


def stretches(tokenizer, sequence: TokenSequence) -> Pieces:
    pairs = zip(sequence.input_ids, sequence.loss_mask, strict=True)  # one mask for each id
    grouped = groupby(pairs, key=lambda pair: pair[1])
    return [(tokenizer.decode([id for id, _ in group]), flag) for flag, group in grouped]


def merged(pieces: Pieces) -> Pieces:
    grouped = groupby(pieces, key=lambda piece: piece[1])
    joined = [("".join(text for text, _ in group), flag) for flag, group in grouped]
    return [(text, flag) for text, flag in joined if text]


def normal(pieces: Pieces, kind: str) -> Pieces:
    """What a kind of tokenizer keeps of a text."""
    if kind == "composed":
        return [(unicodedata.normalize("NFC", text), flag) for text, flag in pieces]
    if kind in ("metaspace after each marker", "swallowed space"):  # adds some, leaves some out
        return merged([("".join(text.split()), flag) for text, flag in pieces])
    if kind == "metaspace":  # and so puts a space at the beginning
        return [(pieces[0][0].lstrip(" "), pieces[0][1]), *pieces[1:]]
    return pieces


def rendered(tokenizer, chats: list) -> tuple[list[Conversation], list[TokenSequence], Counts]:
    """Two times, which must not differ."""
    usable, counts = read(records_of(chats))
    sequences = list(render_all(tokenizer, usable, max_length=10**6, counts=counts))
    assert list(render_all(tokenizer, usable, max_length=10**6, counts=Counts())) == sequences
    kept = {id.partition("_~reply")[0] for id in (sequence.id for sequence in sequences)}
    assert len(kept) == counts.used
    return usable, sequences, counts


@pytest.mark.parametrize("name", ORACLES)
def test_supervised_is_each_reply_with_its_end_and_nothing_else(name):
    template = {**TEMPLATES, "llama31": LLAMA31}[name]
    tokenizers = {kind: make(template) for kind, make in KINDS.items()}

    @thorough
    @given(st.sampled_from(list(KINDS)), st.lists(conversations, min_size=1, max_size=3))
    def check(kind, chats):
        usable, sequences, counts = rendered(tokenizers[kind], chats)
        assert set(counts.dropped) <= {NOTHING_LEFT}
        for conversation, sequence in zip(usable, sequences, strict=True):
            expected = merged(ORACLES[name](list(conversation.turns)))
            assert normal(stretches(tokenizers[kind], sequence), kind) == normal(expected, kind)
            assert sequence.input_ids.count(tokenizers[kind].bos_token_id) == num_bos(
                name, conversation
            )

    check()


@pytest.mark.parametrize("name", REWRITING)
def test_where_history_is_rewritten_each_reply_is_supervised_in_a_sequence_of_its_own(name):
    template, oracle = REWRITING[name]
    tokenizers = {kind: make(template) for kind, make in KINDS.items()}

    @thorough
    @given(st.sampled_from(list(KINDS)), st.lists(conversations, min_size=1, max_size=2))
    def check(kind, chats):
        usable, sequences, counts = rendered(tokenizers[kind], chats)
        found = {sequence.id: sequence for sequence in sequences}
        for conversation in usable:
            turns = list(conversation.turns)
            ends = [i + 1 for i, turn in enumerate(turns) if turn.role == "assistant"]
            if not {conversation.id, with_suffix(conversation.id, "reply1")} & found.keys():
                assert counts.dropped[REWRITTEN]
                assert any(marker in turn.text for turn in turns for marker in MARKERS)
                continue
            for number, end in enumerate(ends, 1):
                part = with_suffix(conversation.id, f"reply{number}")
                sequence = found.pop(conversation.id if conversation.id in found else part)
                expected = merged(oracle(turns[:end]))
                got = stretches(tokenizers[kind], sequence)
                assert normal(got, kind) == normal(expected, kind)
        assert not found

    check()


def num_bos(name: str, conversation: Conversation) -> int:
    if name == "llama2":  # its template writes one in every round
        return sum(turn.role == "user" for turn in conversation.turns)
    return int(name in ("llama3", "llama31", "mistral", "mistral_v3", "gemma", "gemma3"))
