"""Prompt files, and the token ids that a server makes of a prompt."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.config import HeldoutPromptsConfig
from data.conversations import Counts, Turn, read_conversations
from data.files import atomic_write
from data.split import is_heldout, stem
from data.template import chat_text, encode, fold_system, takes_system

log = logging.getLogger(__name__)

EXPECTED = (
    'expected one JSON object a line, with "turns": [text, ...], "prompt": text, or "messages": '
    '[{"role": "user", "content": text}, ...] that end with the user'
)


@dataclass(frozen=True)
class Prompt:
    id: str
    category: str
    messages: list[dict[str, str]]  # role and content; ends with a user's
    more_turns: list[str]  # what the user says after the answers


def read_prompts(path: Path, *, limit: int | None) -> list[Prompt]:
    """The first `limit` prompts of a file. Raises ValueError naming file and line."""
    if not path.is_file():
        raise FileNotFoundError(f"The prompt file {path} does not exist.")
    prompts: dict[str, Prompt] = {}
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if limit is not None and len(prompts) >= limit:
                break
            if line.strip():
                prompt = _prompt(line, f"{path}:{number}", number)
                if prompt.id in prompts:
                    raise ValueError(f"{path}:{number}: the id {prompt.id!r} was used before.")
                prompts[prompt.id] = prompt
    if not prompts:
        raise ValueError(f"{path} holds no prompts; {EXPECTED}.")
    return list(prompts.values())


def prompt_ids(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """What a server's chat endpoint feeds the target: the template's text and nothing more.

    A BOS is there once if the template writes it, and never added: servers do not either.
    """
    turns: Sequence[Turn] = [Turn(message["role"], message["content"]) for message in messages]
    if not takes_system(tokenizer):
        turns = fold_system(turns)
    return encode(tokenizer, [chat_text(tokenizer, turns, generation_prompt=True)])[0].ids


def heldout_prompts(config: HeldoutPromptsConfig) -> Path:
    """Write the first user turn of each held-out chat as a prompt file.

    The parts of a long chat, which share an id stem, give one prompt: they ask alike.
    """
    counts, out = Counts(), Path(config.out)
    seen: set[str] = set()
    lines: list[dict[str, Any]] = []
    for conversation in read_conversations(config.dataset, counts):
        if len(lines) == config.limit:
            break
        chat = stem(conversation.id)
        if chat not in seen and is_heldout(conversation.id, share=config.share, seed=config.seed):
            seen.add(chat)
            prompt = conversation.turns[: 2 if conversation.turns[0].role == "system" else 1]
            messages = [{"role": turn.role, "content": turn.text} for turn in prompt]
            lines.append({"id": conversation.id, "category": "heldout", "messages": messages})
    if not lines:
        raise ValueError(
            f"None of the {counts.used:,} conversations of {config.dataset.path} is held out at "
            f"share={config.share}, seed={config.seed}. Take a larger share."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as tmp, tmp.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    log.info("%d prompts of held-out conversations written to %s", len(lines), out)
    return out


def _prompt(line: str, where: str, number: int) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error}); {EXPECTED}.") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where} is a {type(record).__name__}; {EXPECTED}.")
    texts = record.get("turns", [record.get("prompt")])
    messages: Any = record.get("messages")
    more_turns: list[str] = []
    if isinstance(texts, list) and texts and all(_is_text(text) for text in texts):
        messages, more_turns = [{"role": "user", "content": texts[0]}], texts[1:]
    if not _is_prompt(messages):
        found = ", ".join(map(repr, record)) or "nothing"
        raise ValueError(f"{where} has {found}, but no prompt in it; {EXPECTED}.")
    name = record.get("question_id", record.get("id", number))
    return Prompt(
        id=str(name),
        category=str(record.get("category", "")),
        messages=[{key: m[key] for key in ("role", "content")} for m in messages],
        more_turns=more_turns,
    )


def _is_prompt(messages: Any) -> bool:
    if not isinstance(messages, list) or not messages:
        return False
    roles = [m.get("role") for m in messages if isinstance(m, dict) and _is_text(m.get("content"))]
    known = [role for role in roles if role in ("system", "user", "assistant")]
    return len(known) == len(messages) and known[-1] == "user"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
