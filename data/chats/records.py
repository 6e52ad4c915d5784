"""JSON arrays and JSON lines of any size, gzipped or not, one record at a time."""

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from shlex import quote
from typing import Any, BinaryIO, TextIO

CHUNK = 1 << 20  # characters read at a time
HEAD = 4096  # bytes that show what kind of file it is
RECORD = (
    'a JSON array, or one on each line, of {"id": ..., "conversations": [{"from": "human", '
    '"value": ...}, {"from": "gpt", "value": ...}]} or {"messages": [{"role": "user", '
    '"content": ...}, {"role": "assistant", "content": ...}]}'
)
KEYS = {"conversations", "messages"}
GZIP = b"\x1f\x8b"
# What a file begins with that is no JSON: what it is, and what helps.
OTHER_KINDS = (
    (b"PAR1", "a parquet file", "Name it .parquet: parquet is read by name"),
    (b"ARROW1", "an Arrow file", "Save the data set as JSON lines or parquet instead"),
    (b"PK\x03\x04", "a zip archive", "Unpack it"),
    (b"BZh", "a bzip2 file", "Unpack it, or pack it with gzip"),
    (b"\xfd7zXZ", "an xz file", "Unpack it, or pack it with gzip"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard file", "Unpack it, or pack it with gzip"),
    (b"version https://git-lfs", "a Git LFS pointer and not the data", "Fetch it: `git lfs pull`"),
    (b"<!doctype html", "an HTML page", "Download the file itself, not the page that shows it"),
    (b"<html", "an HTML page", "Download the file itself, not the page that shows it"),
)
UTF16 = (b"\xff\xfe", b"\xfe\xff", b"{\0", b"[\0", b"\0{", b"\0[")


class _TruncatedError(Exception):
    """The file ends inside a record."""


def read_records(file: BinaryIO, name: str, *, allow_truncated: bool) -> Iterator[Any]:
    """Yield the values of a JSON array or of JSON lines, whichever the file holds.

    file: at its beginning, seekable; gzipped or not, which its content says
    name: what messages call it

    Raises ValueError naming the record where the file is no JSON, or where it is cut off unless
    `allow_truncated`.
    """
    number = 0
    try:
        head = _look(file, name)
        unpacked = _unpacked(file)
        text = _text(unpacked)
        values = _array(text, name) if head.lstrip().startswith("[") else _lines(text, name, head)
        for value in values:
            number += 1
            yield value
        if isinstance(unpacked, _Gunzip) and unpacked.is_cut:
            raise _TruncatedError(f"The gzip file {name} is cut off after record {number}.")
    except _TruncatedError as error:
        if not allow_truncated:
            raise ValueError(
                f"{error} Fetch the file again, or use the whole records before this one "
                "with dataset.allow_truncated=true."
            ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"The gzip file {name} is damaged after record {number} ({error}). Fetch it again."
        ) from error


class _Gunzip(io.RawIOBase):
    """The content of a gzip file. One that is cut off just ends, and says so."""

    # GzipFile raises EOFError there, and a text reader then loses what it had read before.

    def __init__(self, file: BinaryIO):
        self._gzip = gzip.GzipFile(fileobj=file)
        self.is_cut = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._gzip.read1(len(buffer))
        except EOFError:
            self.is_cut, data = True, b""
        buffer[: len(data)] = data
        return len(data)


def _unpacked(file: BinaryIO) -> BinaryIO | _Gunzip:
    is_gzip = file.read(len(GZIP)) == GZIP
    file.seek(0)
    return _Gunzip(file) if is_gzip else file


def _text(file: Any) -> io.TextIOWrapper:
    # Bytes that are not UTF-8 become lone surrogates, which JSON escapes may hold as well.
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape")


def _look(file: BinaryIO, name: str) -> str:
    """The first CHUNK characters of the text. Raises ValueError where it is known to be no JSON."""
    _check_kind(_unpacked(file).read(HEAD), name)
    file.seek(0)
    unpacked = _unpacked(file)
    text = _text(unpacked)
    head = text.read(CHUNK)
    text.detach()  # or it would close the file
    file.seek(0)
    if not head and not (isinstance(unpacked, _Gunzip) and unpacked.is_cut):
        raise ValueError(f"{name} is empty. Expected {RECORD}.")
    return head


def _check_kind(head: bytes, name: str) -> None:
    """Raises ValueError for what is known to be something else than JSON in UTF-8."""
    for start, kind, advice in OTHER_KINDS:
        if head.lstrip()[: len(start)].lower() == start.lower():
            raise ValueError(f"{name} is {kind}. {advice}. Expected {RECORD}.")
    if head.startswith(UTF16):
        raise ValueError(
            f"{name} is in UTF-16, expected UTF-8. Convert it, for instance with "
            f"`iconv -f UTF-16 -t UTF-8 {quote(name)} > chats.json`."
        )
    if b"\0" in head:
        raise ValueError(f"{name} is a binary file. Expected {RECORD}.")


def _lines(file: TextIO, name: str, head: str) -> Iterator[Any]:
    number, record = 0, None
    for line_number, line in enumerate(file, 1):
        if not line.strip():
            continue
        number += 1
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            where = f"{name}:{line_number} (record {number})"
            if not line.endswith("\n") and _state(line) == "cut off":
                raise _TruncatedError(f"{where} is cut off ({error}).") from error
            if number == 1 and head.lstrip()[:1] == "{" and _state(head) != "wrong":
                raise ValueError(_one_object(name, head, "over several lines")) from error
            raise ValueError(f"{where} is not JSON ({error}). Expected {RECORD}.") from error
        yield record
    if number == 1 and isinstance(record, dict) and not KEYS & record.keys():
        raise ValueError(_one_object(name, head, "and nothing else"))


def _state(text: str) -> str:
    """Whether a JSON value that begins a text is whole, wrong, or cut off at the text's end."""
    window = _Window(io.StringIO(text))
    window.next_char()
    try:
        window.value()
    except EOFError:
        return "cut off"
    except (ValueError, RecursionError):
        return "wrong"
    return "whole"


def _one_object(name: str, head: str, how: str) -> str:
    members: dict[str, str] = {}  # key -> first character of the value
    at = 0
    while match := _MEMBER.match(head, at):
        members[json.loads(match[1])] = head[match.end() : match.end() + 1]
        try:
            _, at = _DECODE(head, match.end())
        except (ValueError, RecursionError):
            break  # longer than what we look at
    keys = ", ".join(map(repr, members)) or "no key"
    lists = [key for key, start in members.items() if start == "["]
    advice = ""
    if KEYS & members.keys():
        advice = f" `jq -c . {quote(name)} > chats.jsonl` writes each object on one line."
    elif lists:
        program = quote(f".{json.dumps(lists[0])}[]")
        advice = f" `jq -c {program} {quote(name)} > chats.jsonl` takes the list out."
    return f"{name} is one JSON object {how}, with {keys}. Expected {RECORD}.{advice}"


def _array(file: TextIO, name: str) -> Iterator[Any]:
    window = _Window(file)
    window.next_char()
    window.at += 1  # the opening bracket
    number = 0
    while window.next_char() != "]":
        number += 1
        where = f"Record {number} of the array in {name}"
        try:
            yield window.value()
        except EOFError as error:
            raise _TruncatedError(f"{where} is cut off.") from error
        except (ValueError, RecursionError) as error:
            what = getattr(error, "msg", error)  # without positions, which count from the window's
            raise ValueError(f"{where} is not JSON ({what}). Expected {RECORD}.") from error
        mark = window.next_char()
        if not mark:
            raise _TruncatedError(f"The array in {name} is cut off after record {number}.")
        if mark == ",":
            window.at += 1
        elif mark != "]":
            raise ValueError(f"{where} is followed by {mark!r}, expected a comma or a bracket.")
    window.at += 1
    if mark := window.next_char():
        raise ValueError(
            f"The array in {name} ends after {number} records, but {mark!r} follows. "
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
_MEMBER = re.compile(r'[\s{,]*("(?:[^"\\]|\\.)*")\s*:\s*')
