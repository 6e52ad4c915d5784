"""The token ids that a server makes of a prompt, and prompts from held-out chats."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.chats.conversations import Counts, Turn, read_conversations
from data.chats.prompt_sets import Prompt, read_prompt_sets, read_prompts
from data.chats.split import is_heldout, stem
from data.chats.template import chat_text, encode, fold_system, takes_system
from data.config import HeldoutPromptsConfig
from data.files import atomic_write

__all__ = ["Prompt", "heldout_prompts", "prompt_ids", "read_prompt_sets", "read_prompts"]

log = logging.getLogger(__name__)


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
