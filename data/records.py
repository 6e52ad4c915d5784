"""JSON arrays and JSON lines of any size, one record at a time."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

CHUNK = 1 << 20  # characters read at a time
RECORD = (
    'a JSON array, or one on each line, of {"id": ..., "conversations": [{"from": "human", '
    '"value": ...}, {"from": "gpt", "value": ...}]} or {"messages": [{"role": "user", '
    '"content": ...}, {"role": "assistant", "content": ...}]}'
)


class _TruncatedError(Exception):
    """The file ends inside a record."""


def read_records(path: Path, *, allow_truncated: bool) -> Iterator[Any]:
    """Yield the values of a JSON array or of JSON lines, whichever the file holds.

    Raises ValueError naming the record where the file is no JSON, or where it is cut off unless
    `allow_truncated`.
    """
    # Bytes that are not UTF-8 become lone surrogates, which JSON escapes may hold as well.
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        is_array = file.read(CHUNK).lstrip().startswith("[")
        file.seek(0)
        try:
            yield from _array(file, path) if is_array else _lines(file, path)
        except _TruncatedError as error:
            if not allow_truncated:
                raise ValueError(
                    f"{error} Fetch the file again, or use the whole records before this one "
                    "with dataset.allow_truncated=true."
                ) from error


def _lines(file: TextIO, path: Path) -> Iterator[Any]:
    number = 0
    for line_number, line in enumerate(file, 1):
        if not line.strip():
            continue
        number += 1
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            where = f"{path}:{line_number} (record {number})"
            if number > 1 and not line.endswith("\n"):
                raise _TruncatedError(f"{where} is cut off ({error}).") from error
            raise ValueError(f"{where} is not JSON ({error}). Expected {RECORD}.") from error
        yield record


def _array(file: TextIO, path: Path) -> Iterator[Any]:
    window = _Window(file)
    window.next_char()
    window.at += 1  # the opening bracket
    number = 0
    while window.next_char() != "]":
        number += 1
        where = f"Record {number} of the array in {path}"
        try:
            yield window.value()
        except EOFError as error:
            raise _TruncatedError(f"{where} is cut off.") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON ({error.msg}). Expected {RECORD}.") from error
        mark = window.next_char()
        if not mark:
            raise _TruncatedError(f"The array in {path} is cut off after record {number}.")
        if mark == ",":
            window.at += 1
        elif mark != "]":
            raise ValueError(f"{where} is followed by {mark!r}, expected a comma or a bracket.")
    window.at += 1
    if mark := window.next_char():
        raise ValueError(
            f"The array in {path} ends after {number} records, but {mark!r} follows. "
            f"Expected {RECORD}."
        )


class _Window:
    """A piece of a file that moves on by chunks, and grows where one value is larger than that."""

    def __init__(self, file: TextIO):
        self.file = file
        self.text = ""
        self.at = 0  # what is before was used
        self.ended = False  # nothing comes after

    def _more(self) -> None:
        # Twice as much each time, so that a long value is not decoded over and over.
        chunk = self.file.read(max(CHUNK, len(self.text) - self.at))
        self.text, self.at, self.ended = self.text[self.at :] + chunk, 0, not chunk

    def next_char(self) -> str:
        """Skip white space. Returns the character after it, or nothing at the end."""
        while True:
            while self.text[self.at : self.at + 1].isspace():
                self.at += 1
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self._more()

    def value(self) -> Any:
        """Decode the value here. Raises JSONDecodeError, or EOFError where the file ends in it."""
        while True:
            try:
                value, end = _DECODE(self.text, self.at)
            except json.JSONDecodeError as error:
                if not self._may_go_on(error):
                    raise
                if self.ended:
                    raise EOFError from error
            else:
                if end < len(self.text) or self.ended:  # a number may go on after the edge
                    self.at = end
                    return value
            self._more()

    def _may_go_on(self, error: json.JSONDecodeError) -> bool:
        """Whether the text only lacks what comes next, and is not wrong so far."""
        rest = self.text[error.pos :]
        if error.msg.startswith("Unterminated string"):
            return True
        if error.msg.startswith("Invalid"):  # an escape, of up to two times 6 characters
            return len(rest) < 12
        return _PART.fullmatch(rest) is not None or any(word.startswith(rest) for word in _WORDS)


_DECODE = json.JSONDecoder().raw_decode
_PART = re.compile(r"\s*|[-+.eE0-9]+")  # nothing, or some of a number
_WORDS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
