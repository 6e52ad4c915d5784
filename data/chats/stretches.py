"""A token sequence as the text that it stands for, cut where the mask or the speaker changes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from html import escape
from itertools import groupby
from typing import Any

from data.chats.conversations import Conversation
from data.chats.rendering import TokenSequence
from data.chats.template import (
    ChatText,
    chat_texts,
    control_tokens,
    encode,
    fold_system,
    takes_system,
)

SUPERVISED, TURN, FRAME, CUT = "supervised", "turn", "frame", "cut"
MARKS = ("⟦", "⟧")  # around supervised text where there is no colour
LEGEND = {
    SUPERVISED: "supervised: a reply and its end-of-turn token",
    TURN: "what users and system say",
    FRAME: "the template's own text",
}
LINE_END = "↵: supervised line end"
# What a terminal makes of these is not text: it would clear the screen, or turn the line around.
UNSEEN: dict[int, int | str] = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **{
        code: f"<U+{code:04X}>"
        for code in (*range(0x80, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A))
    },
}
ANSI = {SUPERVISED: "30;42", TURN: "", FRAME: "2", CUT: "3;33"}
ANSI_CONTROL = "4"
SHARE = 4  # of the characters shown of a sequence, one stretch gets at most one in so many


@dataclass(frozen=True)
class Stretch:
    text: str
    kind: str  # supervised, turn, frame; or cut: a note on what is left out
    is_control: bool = False  # control tokens, and not text that reads like them


def stretches(tokenizer: Any, sequence: TokenSequence, conversation: Conversation) -> list[Stretch]:
    """The decoded text of a sequence of this conversation, all of it and in order.

    Where the template has changed the text of a turn, turns cannot be told from the frame and all
    that is not supervised counts as a turn.
    """
    ids, control = sequence.input_ids, control_tokens(tokenizer)
    in_turn = _in_turn(tokenizer, sequence, conversation)
    kinds = [
        (SUPERVISED if is_reply else TURN if is_said else FRAME, id in control)
        for id, is_reply, is_said in zip(ids, sequence.loss_mask, in_turn, strict=True)
    ]
    found = []
    before, start = 0, 0
    for (kind, is_control), group in groupby(kinds):
        end = start + len(list(group))
        # Decoded after what stands before it: some tokenizers drop the space that opens a text.
        known, longer = tokenizer.decode(ids[before:start]), tokenizer.decode(ids[before:end])
        found.append(Stretch(longer.removeprefix(known), kind, is_control))
        before, start = start, end
    return found


def shorten(parts: Sequence[Stretch], max_chars: int | None) -> list[Stretch]:
    """Long stretches without their middle, so that their edges show; then the end left out."""
    if max_chars is None:
        return list(parts)
    shown: list[Stretch] = []
    room = max_chars
    for number, part in enumerate(parts):
        if room <= 0:
            left = sum(len(rest.text) for rest in parts[number:])
            return [*shown, Stretch(f"… {left:,} more characters", CUT)]
        half = max_chars // SHARE // 2
        left = len(part.text) - 2 * half
        if left > half:
            note = Stretch(f" … {left:,} more characters … ", CUT)
            first, last = part.text[:half], part.text[-half:]
            shown += [replace(part, text=first), note, replace(part, text=last)]
            room -= 2 * half
        else:
            shown.append(part)
            room -= len(part.text)
    return shown


def legend(*, color: bool) -> str:
    """One line that says what the looks of `as_text` mean."""
    if not color:
        return f"{MARKS[0]}{LEGEND[SUPERVISED]}{MARKS[1]}, and around it what is not"
    parts = [_painted(text, ANSI[kind]) for kind, text in LEGEND.items()]
    return "  ".join([*parts, _painted("control token", ANSI_CONTROL), LINE_END])


def as_text(parts: Sequence[Stretch], *, color: bool) -> str:
    """For the terminal: colours, or marks around what is supervised.

    A mark that is part of the text is written \\⟦ or \\⟧.
    """
    return "".join(_colored(parts) if color else _marked(parts))


def as_html(parts: Sequence[Stretch]) -> str:
    """For a page: one `span` a stretch, its kind and `control` being its classes."""
    return "".join(
        f'<span class="{part.kind}{" control" * part.is_control}">{escape(_seen(part))}</span>'
        for part in parts
    )


def printable(text: str) -> str:
    """`text` with a visible sign for each character that would steer a terminal."""
    return text.translate(UNSEEN)


def _in_turn(tokenizer: Any, sequence: TokenSequence, conversation: Conversation) -> list[bool]:
    """Which tokens stand for text of a turn. [T]"""
    turns = conversation.turns
    if not takes_system(tokenizer):
        turns = tuple(fold_system(turns))
    texts = chat_texts(tokenizer, conversation.id, turns)
    text = next((text for text in texts if text.id == sequence.id), None)
    if text is None or not text.turns:
        return [True] * len(sequence.input_ids)
    return _moved(*_said(tokenizer, text), sequence.input_ids)


def _said(tokenizer: Any, text: ChatText) -> tuple[list[int], list[bool]]:
    """Ids of the text, and which of them stand for a part of a turn that is not supervised."""
    is_said = [False] * len(text.text)
    for spans, value in ((text.turns, True), (text.replies, False)):
        for start, end in spans:
            is_said[start:end] = [value] * (end - start)
    (encoding,) = encode(tokenizer, [text.text])
    # Some tokenizers leave white space out of the offsets: all of a token's, if it is nothing else.
    spans = [(start, max(end, start + 1)) for start, end in encoding.offsets]
    return encoding.ids, [any(is_said[start:end]) for start, end in spans]


def _moved(ids: list[int], flags: list[bool], others: list[int]) -> list[bool]:
    """Flags of `ids` for `others`, where some tokens are spelled by others or cut in two."""
    if others == ids[: len(others)]:
        return flags[: len(others)]
    moved: list[bool] = []
    matcher = SequenceMatcher(None, ids[: len(others)], others, autojunk=False)
    for tag, first, last, begin, end in matcher.get_opcodes():
        if tag == "equal":
            moved += flags[first:last]
        else:
            moved += [any(flags[first:last] or flags[first - 1 : first])] * (end - begin)
    return moved


def _colored(parts: Sequence[Stretch]) -> Iterator[str]:
    for part in parts:
        codes = [ANSI[part.kind]] + [ANSI_CONTROL] * part.is_control
        # Line by line: a terminal would paint the rest of the line, and a pager forget the colour.
        for line in _seen(part).splitlines(keepends=True):
            body, end = (line[:-1], "\n") if line.endswith("\n") else (line, "")
            yield _painted(body, ";".join(filter(None, codes))) + end


def _marked(parts: Sequence[Stretch]) -> Iterator[str]:
    is_open = False
    for number, part in enumerate(parts, 1):
        goes_on = part.kind == CUT and number < len(parts)
        if not goes_on and (part.kind == SUPERVISED) != is_open:
            yield MARKS[is_open]
            is_open = not is_open
        text = printable(part.text)
        for mark in MARKS:
            text = text.replace(mark, f"\\{mark}")
        yield text
    yield MARKS[1] * is_open


def _seen(part: Stretch) -> str:
    text = printable(part.text)
    return text.replace("\n", "↵\n") if part.kind == SUPERVISED else text


def _painted(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if code and text else text
