"""Chat files to conversations that every chat template accepts; all that is changed is counted.

A conversation comes out as an optional system turn, then user and assistant turns in alternation,
from a user turn to an assistant turn. What is in the way of that, and what happens then:

    blank turn                                  the turn is removed
    same role twice in a row                    the turns are joined by a blank line
    reply first                                 the reply is removed
    no reply to the last turn                   the turn is removed
    turn that is no text, speaker that is       the conversation ends before it: what follows
      neither user nor assistant, later           answers to something that cannot be shown
      system turn
    NUL, lone surrogate, invalid UTF-8          removed; replaced by U+FFFD
    repeated id                                 made unique, of the same stem
    number as id                                its digits, so that 7, 7.0 and "7" are repeated
    missing, null or blank id; list, ...        the record's number
    no user turn with a reply is left           the record is dropped
    record of another shape                     the record is dropped

A key whose value is null counts as absent: that is how Arrow writes what a record does not have.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

from data.chats.records import RECORD
from data.chats.sources import source_records
from data.chats.split import with_suffix
from data.config import DatasetConfig

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}
NUM_EXAMPLES = 3  # kept for each reason
MAX_REASONS = 40  # told apart, dropped and mended: a speaker's name is one, and there may be many
MAX_NAME = 40  # characters shown of a name that the data gives


@dataclass(frozen=True)
class Turn:
    role: str  # system, user or assistant
    text: str


@dataclass(frozen=True)
class Conversation:
    id: str
    turns: tuple[Turn, ...]


@dataclass
class Counts:
    """What became of the records: every one was either used or dropped, some were mended."""

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # records by reason
    mended: Counter[str] = field(default_factory=Counter)  # conversations by reason
    examples: dict[str, list[str]] = field(default_factory=dict)  # reason -> a few ids

    @property
    def used(self) -> int:
        return self.read - self.dropped.total()

    def drop(self, reason: str, example: str) -> None:
        self._count(self.dropped, reason, example)

    def mend(self, reason: str, example: str) -> None:
        self._count(self.mended, reason, example)

    def to_json(self) -> dict[str, Any]:
        return {
            "read": self.read,
            "used": self.used,
            "dropped": dict(self.dropped.most_common()),
            "mended": dict(self.mended.most_common()),
            "examples": self.examples,
        }

    def summary(self) -> str:
        """Lines for the terminal."""
        lines = [f"{self.used:,} of {self.read:,} conversations used"]
        for title, counter in (("dropped", self.dropped), ("mended", self.mended)):
            for reason, count in counter.most_common():
                examples = ", ".join(self.examples[reason])
                lines.append(f"  {title} {count:>8,}  {reason}  ({examples})")
        return "\n".join(lines)

    def _count(self, counter: Counter[str], reason: str, example: str) -> None:
        if reason not in self.examples and len(self.examples) >= MAX_REASONS:
            reason = "other reasons"
        counter[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < NUM_EXAMPLES:
            examples.append(example)


def read_conversations(config: DatasetConfig, counts: Counts) -> Iterator[Conversation]:
    """Yield the usable conversations of a file, folder or hub data set, in order, in flat memory.

    Raises what `source_records` raises, and ValueError at the end if nothing, or less than
    `1 - max_dropped` of the records, could be used.
    """
    seen: dict[str, int] = {}  # id -> how often
    for record in source_records(config):
        counts.read += 1
        conversation = _conversation(record, counts)
        if conversation is None:
            continue
        yield _unique(conversation, seen, counts)
        if config.limit is not None and len(seen) >= config.limit:
            break
    _check_dropped(config, len(seen), counts)


def _check_dropped(config: DatasetConfig, num_used: int, counts: Counts) -> None:
    if not counts.read:
        raise ValueError(f"{config.path} holds no records. It must hold {RECORD}.")
    share = 1 - num_used / counts.read
    if not num_used or share > config.max_dropped:
        raise ValueError(
            f"{share:.0%} of the records of {config.path} cannot be used; at most "
            f"{config.max_dropped:.0%} may be dropped (dataset.max_dropped).\n{counts.summary()}\n"
            f"It must hold {RECORD}."
        )


def _unique(conversation: Conversation, seen: dict[str, int], counts: Counts) -> Conversation:
    name = conversation.id
    if name in seen:
        counts.mend("repeated id", name)
    while name in seen:  # once, unless the file itself holds such ids
        seen[conversation.id] += 1
        name = with_suffix(conversation.id, str(seen[conversation.id]))
    seen[name] = 1
    return Conversation(name, conversation.turns)


def _conversation(record: Any, counts: Counts) -> Conversation | None:
    name = f"record {counts.read}"
    if not isinstance(record, dict):
        counts.drop(f"record is {_kind(record)}", name)
        return None
    name, reasons = _name(record.get("id"), name)
    turns = _first(record, "conversations", "messages")
    if not isinstance(turns, list):
        counts.drop('no list "conversations" or "messages"', f"{name} has {_members(record)}")
        return None
    usable, turn_reasons = _usable(turns)
    if not any(turn.role == "assistant" for turn in usable):
        counts.drop(_why_dropped(turns, turn_reasons), name)
        return None
    for reason in reasons + turn_reasons:
        counts.mend(reason, name)
    return Conversation(name, tuple(usable))


def _name(value: Any, number: str) -> tuple[str, list[str]]:
    """A conversation's id, and the reason if it is not the given one."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # what Arrow and pandas make of whole numbers beside a null
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str) and value.strip():
        return _text(value), []
    if value is None or value == "" or value != value:  # nan is null to pandas
        return number, ["no id"]
    return number, [f"id that is {'blank' if isinstance(value, str) else _kind(value)}"]


def _why_dropped(turns: list, reasons: list[str]) -> str:
    if not turns:
        return "empty conversation"
    cut = [reason for reason in reasons if reason.startswith("cut off")]
    return f"no user turn with a reply{': ' * bool(cut)}{', '.join(cut)}"


def _usable(raw: list) -> tuple[list[Turn], list[str]]:
    """The turns that can be used, and the reasons why they are not the given ones."""
    reasons: dict[str, None] = {}  # a set in order
    turns: list[Turn] = []
    for item in raw:
        turn = _turn(item)
        if isinstance(turn, str):
            reasons[f"cut off before {turn}"] = None
            break
        if turn.role == "system" and turns and turns[-1].role != "system":
            reasons["cut off before a later system turn"] = None
            break
        text = _text(turn.text)
        if text != turn.text:
            reasons["NUL or invalid Unicode in the text"] = None
        if text.strip():
            turns.append(Turn(turn.role, text))
        else:
            reasons["blank turn"] = None
    joined = [
        Turn(role, "\n\n".join(turn.text for turn in group))
        for role, group in groupby(turns, key=lambda turn: turn.role)
    ]
    if len(joined) < len(turns):
        reasons["same role twice in a row"] = None
    first = 1 if joined and joined[0].role == "system" else 0
    if len(joined) > first and joined[first].role == "assistant":
        reasons["reply first"] = None
        del joined[first]
    if joined and joined[-1].role == "user":
        reasons["no reply to the last turn"] = None
        joined.pop()
    return joined, list(reasons)


def _turn(item: Any) -> Turn | str:
    """A turn as it was read, or what is wrong with it."""
    if not isinstance(item, dict):
        return f"a turn that is {_kind(item)}"
    speaker = _first(item, "from", "role")
    if speaker is None:
        return f"a turn without a speaker, with {_members(item)}"
    role = ROLES.get(speaker.strip().lower()) if isinstance(speaker, str) else None
    if role is None:
        return f"the speaker {_short(speaker)}"
    content = _first(item, "value", "content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            return "a turn with parts that are not text"
        return Turn(role, "".join(texts))
    return Turn(role, content) if isinstance(content, str) else f"a turn that is {_kind(content)}"


def _first(values: dict, *keys: str) -> Any:
    """The value of the first of the keys that has one."""
    return next((values[key] for key in keys if values.get(key) is not None), None)


def _text(text: str) -> str:
    # Tokenizers take valid Unicode only, and a NUL ends the string in some.
    return re.sub("[\ud800-\udfff]", "\ufffd", text).replace("\0", "")


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "a truth value"}
    kinds |= {int: "a number", float: "a number", type(None): "null"}
    return kinds.get(type(value), type(value).__name__)


def _members(record: dict) -> str:
    """The keys of an object, and what they hold."""
    shown = [f"{_short(key)} ({_kind(value)})" for key, value in islice(record.items(), 6)]
    more = len(record) - len(shown)
    return (", ".join(shown) or "no key") + f" and {more:,} more" * (more > 0)


def _short(name: Any) -> str:
    text = repr(name)
    return text if len(text) <= MAX_NAME else f"{text[:MAX_NAME]}…"
