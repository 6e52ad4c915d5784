"""Prompt files as they are published, and which of a few known forms each record has.

| form | recognised by | what the user says |
|---|---|---|
| MT-bench | `turns` | the turns, one after the other |
| chat | `messages` | the messages; the last one is the user's |
| HumanEval | `prompt` and `entry_point` | a request to complete the code |
| GSM8K | `question` | the question |
| Alpaca | `instruction`, perhaps `input` | the instruction, a blank line, the input |
| plain | `prompt`, or a bare text | the prompt |

A file is JSON lines or a JSON array (.json, .jsonl), or has one prompt on each line (.txt); it may
be gzipped. Its name without the endings is the name of the set.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMS = '"turns", "messages", "prompt", "question" or "instruction"'
EXPECTED = (
    f"expected a record with {FORMS} (MT-bench, chat, HumanEval, GSM8K, Alpaca or plain prompts), "
    "whose texts are not empty and whose last message is the user's"
)
SUFFIXES = (".jsonl", ".json", ".txt")
GZIP = b"\x1f\x8b"
COMPLETE = "Complete this Python function:\n\n"  # HumanEval's prompt is bare code
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Prompt:
    id: str
    category: str
    messages: list[dict[str, str]]  # role and content; ends with a user's
    more_turns: list[str]  # what the user says after the answers


def read_prompt_sets(places: Any, *, limit: int | None) -> dict[str, list[Prompt]]:
    """The first `limit` prompts of each set, by the set's name.

    places: a file, a folder of such files, a list of these, or {name: file}

    Raises FileNotFoundError, and ValueError that names the file and the record.
    """
    return {name: read_prompts(file, limit=limit) for name, file in prompt_files(places).items()}


def prompt_files(places: Any) -> dict[str, Path]:
    """The file of each set. Raises FileNotFoundError; ValueError if two sets have one name."""
    if isinstance(places, Mapping):
        return {str(name): _existing(file) for name, file in places.items()}
    places = [places] if isinstance(places, (str, Path)) else list(places)
    files = [file for place in places for file in _files(_existing(place))]
    named: dict[str, Path] = {}
    for file in files:
        name = _set_name(file)
        if name in named:
            raise ValueError(
                f"prompts has two sets called {name}: {named[name]} and {file}. Name them, as "
                "prompts={one:FILE,other:FILE}."
            )
        named[name] = file
    if not named:
        raise ValueError("prompts is empty, expected at least one file or folder.")
    return named


def read_prompts(path: Path, *, limit: int | None) -> list[Prompt]:
    """The first `limit` prompts of a file. Raises ValueError that names file and record."""
    prompts: dict[str, Prompt] = {}
    for where, number, record in _records(_existing(path)):
        if limit is not None and len(prompts) >= limit:
            break
        prompt = _prompt(record, where, number)
        if prompt.id in prompts:
            raise ValueError(f"{where}: the id {prompt.id!r} was used before.")
        prompts[prompt.id] = prompt
    if not prompts:
        raise ValueError(f"{path} holds no prompts; {EXPECTED}.")
    return list(prompts.values())


# --- files --------------------------------------------------------------------------------------


def _existing(place: str | Path) -> Path:
    path = Path(place).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"The prompt file {path} does not exist.")
    return path


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(file for file in path.iterdir() if _ending(file))
    if not files:
        raise ValueError(
            f"The folder {path} holds no prompt file, expected names that end with "
            f"{', '.join(SUFFIXES)}, or with these and .gz."
        )
    return files


def _ending(file: Path) -> str:
    name = file.name.removesuffix(".gz")
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")


def _set_name(file: Path) -> str:
    return file.name.removesuffix(".gz").removesuffix(_ending(file))


def _records(path: Path) -> Iterator[tuple[str, int, Any]]:
    """Where each record is, its number and its value."""
    text = _text(path)
    if _ending(path) == ".txt":
        yield from _numbered(path, text, lambda line, _: line)
    elif text.lstrip().startswith("["):
        values = _json(text, str(path))
        yield from ((f"{path}, record {n}", n, value) for n, value in enumerate(values, 1))
    else:
        yield from _numbered(path, text, _json)


def _numbered(
    path: Path, text: str, read: Callable[[str, str], Any]
) -> Iterator[tuple[str, int, Any]]:
    # Not splitlines: JSON strings may hold the separators that only it knows.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}:{number}"
            yield where, number, read(line.strip(), where)


def _text(path: Path) -> str:
    data = path.read_bytes()
    try:
        return (gzip.decompress(data) if data.startswith(GZIP) else data).decode("utf-8-sig")
    except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is no text in UTF-8, gzipped or not ({error}).") from error


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error}); {EXPECTED}.") from error


# --- records ------------------------------------------------------------------------------------


def _prompt(record: Any, where: str, number: int) -> Prompt:
    if isinstance(record, str):
        record = {"prompt": record}
    if not isinstance(record, dict):
        raise ValueError(f"{where} is a {type(record).__name__}; {EXPECTED}.")
    messages, more_turns = _said(record)
    if not (_are_messages(messages) and all(map(_is_text, more_turns))):
        found = ", ".join(map(repr, record)) or "nothing"
        raise ValueError(f"{where} has {found}, but no prompt in it; {EXPECTED}.")
    names = (record.get(key) for key in ("question_id", "task_id", "id"))
    return Prompt(
        id=str(next((name for name in names if name is not None), number)),
        category=str(record.get("category") or ""),
        messages=[{key: message[key] for key in ("role", "content")} for message in messages],
        more_turns=list(more_turns),
    )


def _said(record: dict[str, Any]) -> tuple[Any, Sequence[Any]]:
    """The messages of a record and the user's later turns; unchecked, none if it has no form."""
    if "turns" in record:
        turns = record["turns"]
        return (_user(turns[0]), turns[1:]) if isinstance(turns, list) and turns else ([], [])
    if "messages" in record:
        return record["messages"], []
    if "prompt" in record:
        prompt = record["prompt"]
        is_code = "entry_point" in record and _is_text(prompt)
        return _user(COMPLETE + prompt.strip("\n") if is_code else prompt), []
    if "question" in record:
        return _user(record["question"]), []
    instruction, more = record.get("instruction"), record.get("input")
    return _user(f"{instruction}\n\n{more}" if _is_text(more) and instruction else instruction), []


def _user(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _are_messages(messages: Any) -> bool:
    if not isinstance(messages, list) or not messages:
        return False
    are_known = all(
        isinstance(m, dict) and m.get("role") in ROLES and _is_text(m.get("content"))
        for m in messages
    )
    return are_known and messages[-1]["role"] == "user"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
