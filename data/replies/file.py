"""From the log to the chat file that the dump reads: the order of the input, and what was kept."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.chats.conversations import Conversation, Counts, read_conversations
from data.config import DatasetConfig
from data.files import atomic_write, writing
from data.replies.log import ReplyLog
from data.replies.rules import NOT_REPRODUCED, Reply

log = logging.getLogger(__name__)


@dataclass
class Outcome:
    """What became of the chats and their replies."""

    chats: Counts
    kept: int = 0  # replies
    tokens: int = 0  # in them
    unchecked: int = 0  # replies of which the server did not say the tokens
    not_reproduced: int = 0  # replies


def write_chats(dataset: DatasetConfig, replies: ReplyLog, out: Path) -> dict[str, Any]:
    """Write the chats with the replies of a finished log, in their order. Returns the counts.

    A line is {"id": ..., "messages": [...], "ended_before": why the chat ends early, or null}.

    Raises ValueError with the reasons if no reply could be kept.
    """
    outcome = Outcome(Counts())
    with (
        writing(out, also_reads=True),
        atomic_write(out) as tmp,
        tmp.open("w", encoding="utf-8") as file,
    ):
        for conversation in read_conversations(dataset, Counts()):
            record = _record(conversation, replies.replies(conversation.id), outcome)
            if record:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        if not outcome.kept:
            raise ValueError(
                "No reply could be kept, so there is nothing to write.\n"
                f"{outcome.chats.summary()}\n"
                "Give them more room (max_new_tokens, max_length), and another out=FILE."
            )
    log.info("written: %s", outcome.chats.summary())
    share = outcome.not_reproduced / max(outcome.kept + outcome.not_reproduced, 1)
    log.info(
        "replies: %s kept with %s tokens; %s not reproduced by the template (%.1f %%)%s",
        f"{outcome.kept:,}",
        f"{outcome.tokens:,}",
        f"{outcome.not_reproduced:,}",
        100 * share,
        f"; {outcome.unchecked:,} not checked, as the server gives no token ids"
        if outcome.unchecked
        else "",
    )
    return {
        "chats": outcome.chats.to_json(),
        "replies": outcome.kept,
        "tokens": outcome.tokens,
        "not_reproduced": outcome.not_reproduced,
        "not_checked": outcome.unchecked,
    }


def _record(
    conversation: Conversation, replies: Sequence[Reply], outcome: Outcome
) -> dict[str, Any] | None:
    """A line of the file; None if not even the first reply could be kept."""
    outcome.chats.read += 1
    kept = [reply for reply in replies if not reply.problem]
    problem = next((reply.problem for reply in replies if reply.problem), None)
    outcome.kept += len(kept)
    outcome.tokens += sum(reply.tokens for reply in kept)
    outcome.unchecked += sum(not reply.checked for reply in kept)
    outcome.not_reproduced += problem == NOT_REPRODUCED
    if not kept:
        outcome.chats.drop(f"no reply kept: {problem}", conversation.id)
        return None
    if problem:
        outcome.chats.mend(f"ended before a {problem}", conversation.id)
    answers = iter(kept)
    messages = []
    for turn in conversation.turns:
        if turn.role != "assistant":
            messages.append({"role": turn.role, "content": turn.text})
        elif reply := next(answers, None):
            messages.append({"role": "assistant", "content": reply.text})
        else:
            break
    if messages[-1]["role"] == "user":
        messages.pop()
    return {"id": conversation.id, "messages": messages, "ended_before": problem}
