"""The replies that were written so far: one file, only ever appended to.

OUT.part    a line that says what is being done, then one line for each reply, as they come
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from data.files import writing
from data.replies.rules import Reply


class ReplyLog:
    """What lies in a log; only where each line begins is kept in memory."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        """file: open for reading and appending. A last line that was cut off is removed.

        Raises ValueError naming file and line if one is not what was written.
        """
        self.path = path
        self.header: dict[str, Any] | None = None  # None: a new log
        self._file = file
        self._lines: dict[str, list[int]] = {}  # conversation -> where its replies are, in order
        file.seek(0)
        end = 0
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break  # the process died while it wrote this line
            self._note(line, end, number)
            end += len(line)
        file.truncate(end)

    def __len__(self) -> int:
        """Replies in it."""
        return sum(map(len, self._lines.values()))

    def begin(self, header: dict[str, Any]) -> None:
        """Write the first line of a new log."""
        self.header = header
        self._write(json.dumps(header, ensure_ascii=False) + "\n")

    def append(self, replies: Sequence[Reply]) -> None:
        """Write replies at once; they are on the disk when this returns."""
        end = self._file.seek(0, os.SEEK_END)
        lines = [json.dumps(asdict(reply), ensure_ascii=False) + "\n" for reply in replies]
        self._write("".join(lines))
        for reply, line in zip(replies, lines, strict=True):
            self._lines.setdefault(reply.id, []).append(end)
            end += len(line.encode())

    def find(self, name: str, number: int) -> Reply | None:
        """Reply `number` of a conversation, if it is there."""
        places = self._lines.get(name, [])
        return self._read(places[number]) if number < len(places) else None

    def replies(self, name: str) -> list[Reply]:
        """The replies of a conversation, in order."""
        return [self._read(place) for place in self._lines.get(name, [])]

    def _read(self, place: int) -> Reply:
        self._file.seek(place)
        return Reply(**json.loads(self._file.readline()))

    def _write(self, text: str) -> None:
        # Past the buffer: what could not be written must not be tried again at closing.
        rest, descriptor = text.encode(), self._file.fileno()
        with writing(self.path):
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)

    def _note(self, line: bytes, place: int, number: int) -> None:
        try:
            record = json.loads(line)
            if number == 1:
                self.header = record
                return
            reply = Reply(**record)
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
            raise ValueError(
                f"{self.path}:{number} is not a reply that was written here ({error}). Delete the "
                "file to begin anew, or that line and all after it."
            ) from error
        self._lines.setdefault(reply.id, []).append(place)
