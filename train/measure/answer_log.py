"""The answers that were measured so far: one file, only ever appended to, so that a run goes on.

OUT/answers.jsonl   a line that says what is measured and how, then one line for each answer, and
                    one for each figure that must not change when a run goes on
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data.files import writing
from train.config import flat

FORMAT_VERSION = 1
ANSWERS = "answers.jsonl"


class AnswerLog:
    """What lies in a log. Each answer is a JSON object, told apart by `KEY`."""

    KEY = ("set", "prompt", "turn")

    def __init__(self, out: Path, header: dict[str, Any], *, restart: bool = False) -> None:
        """Open OUT/answers.jsonl, or begin it.

        header:  what is measured and how: an answer counts only if it was measured just so
        restart: begin anew, whatever is there

        Raises ValueError that names each field in which the header there differs, and for a line
        that no log has.
        """
        self.path = out / ANSWERS
        self.header = {"format_version": FORMAT_VERSION, **header}
        self._answers: dict[tuple, dict[str, Any]] = {}
        self._figures: dict[str, Any] = {}
        out.mkdir(parents=True, exist_ok=True)
        if restart or not self._read():
            self.path.unlink(missing_ok=True)
            self._append(self.header)

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def answers(self) -> list[dict[str, Any]]:
        """All of them, in the order in which they were measured."""
        return list(self._answers.values())

    def find(self, *key: Any) -> dict[str, Any] | None:
        """The answer to a turn of a prompt of a set."""
        return self._answers.get(key)

    def once(self, figure: str, measure: Callable[[], Any]) -> Any:
        """What `measure` gives, or gave when it was asked for the first time; a JSON value."""
        if figure not in self._figures:
            value = json.loads(json.dumps(measure()))
            self._append({"figure": figure, "value": value})
            self._figures[figure] = value
        return self._figures[figure]

    def append(self, answers: Sequence[dict[str, Any]]) -> None:
        """Add answers; they are on the disk when this returns."""
        self._append(*answers)
        for answer in answers:
            # As it would be read again: what is made of a log must not depend on when it was read.
            self._note(json.loads(json.dumps(answer)))

    def _note(self, answer: dict[str, Any]) -> None:
        if "figure" in answer:
            self._figures[answer["figure"]] = answer["value"]
            return
        self._answers[tuple(answer[name] for name in self.KEY)] = answer

    def _read(self) -> bool:
        """Whether there is a log to go on with. A last line that was cut off is removed."""
        if not self.path.is_file():
            return False
        whole = 0
        header: dict[str, Any] | None = None
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # the process died while it wrote this line
                whole += len(line)
                record = self._record(line, number)
                if header is None:
                    header = record
                    self._check(header)
                else:
                    self._note(record)
        os.truncate(self.path, whole)
        return header is not None

    def _record(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            record = json.loads(line)
            if number > 1:
                [record[name] for name in (("value",) if "figure" in record else self.KEY)]
            return dict(record)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{self.path}:{number} is not an answer that was written here ({error!r}). Delete "
                "that line and all after it to go on from there, or begin anew with restart=true."
            ) from error

    def _check(self, found: dict[str, Any]) -> None:
        ours, theirs = (flat(json.loads(json.dumps(each))) for each in (self.header, found))
        names = [n for n in dict.fromkeys([*ours, *theirs]) if ours.get(n) != theirs.get(n)]
        if names:
            lines = (f"{n} is {ours.get(n)!r} now, {theirs.get(n)!r} there" for n in names)
            raise ValueError(
                f"{self.path} holds answers that were measured otherwise: {'; '.join(lines)}. "
                "Measure into another folder (out=...), go on with the settings there, or "
                "discard those answers with restart=true."
            )

    def _append(self, *records: dict[str, Any]) -> None:
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        with writing(self.path), self.path.open("ab") as file:
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
