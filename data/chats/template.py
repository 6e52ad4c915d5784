"""Where the turns of a conversation lie in the text that the target's chat template makes of it.

A rendering of the same roles with a placeholder in each turn shows what the template writes before,
between and after the turns: its *frame*. The real rendering must then be exactly the frame with the
turns in between. Nothing is ever searched for inside a turn.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from data.chats.conversations import Turn
from data.chats.split import with_suffix

Span = tuple[int, int]  # first character, and the one after the last


@dataclass(frozen=True)
class ChatText:
    """A rendered conversation, and where its parts are."""

    id: str
    text: str
    turns: list[Span]  # in order; empty if the template changed the text of a turn
    replies: list[Span]  # what is supervised, in order


def chat_text(tokenizer: Any, turns: Sequence[Turn], *, generation_prompt: bool = False) -> str:
    """The turns in the target's chat template."""
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=generation_prompt
    )


def takes_system(tokenizer: Any) -> bool:
    """Whether the template has a place for a system turn."""
    return _takes_system(tokenizer, _template(tokenizer))


def fold_system(turns: Sequence[Turn]) -> Sequence[Turn]:
    """Put the system turn's text before the first user's, for a template without a place for it."""
    if turns[0].role != "system":
        return turns
    system, user, *rest = turns
    return [Turn("user", f"{system.text}\n\n{user.text}"), *rest]


def chat_texts(tokenizer: Any, name: str, turns: Sequence[Turn]) -> list[ChatText]:
    """The texts of one conversation that ends with a reply.

    One text; one for each reply where the template rewrites history; none if these turns are
    rewritten beyond recognition. Raises ValueError for a template whose replies are not what a
    server generates.
    """
    template = _template(tokenizer)
    roles = tuple(turn.role for turn in turns)
    if _keeps_history(tokenizer, template, roles):
        text = chat_text(tokenizer, turns)
        if spans := _locate(text, _literals(tokenizer, template, roles, False), turns):
            frames = {k: _frame(tokenizer, template, roles[: k + 1]) for k in _replies(roles)}
            replies = [(spans[k][0] - f.lead, spans[k][1] + f.end) for k, f in frames.items()]
            return [ChatText(name, text, spans, replies)]
    texts = []
    for number, k in enumerate(_replies(roles), 1):
        frame = _frame(tokenizer, template, roles[: k + 1])
        reply = _last_reply(tokenizer, with_suffix(name, f"reply{number}"), turns[: k + 1], frame)
        if reply is None:
            return []
        texts.append(reply)
    return texts


def control_tokens(tokenizer: Any) -> frozenset[int]:
    """The ids that only the template may write: special tokens, and what ends a turn."""
    return _control_tokens(tokenizer, _template(tokenizer))


def encode(tokenizer: Any, texts: list[str]) -> list[Any]:
    """Ids and character offsets, without special tokens: the template has written them all."""
    return tokenizer(texts, add_special_tokens=False, verbose=False).encodings if texts else []


# --- the frame ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Frame:
    """The template's text around turns that end with a reply."""

    literals: tuple[str, ...]  # before each turn, and after the last
    lead: int  # characters before the last reply that the server generates, not the prompt holds
    end: int  # characters after it, up to the end of its end-of-turn token


def _template(tokenizer: Any) -> str:
    if not tokenizer.chat_template:
        raise ValueError(
            f"The tokenizer of {tokenizer.name_or_path!r} has no chat template. Features must come "
            "from the text that is served: use a target with a chat template."
        )
    return tokenizer.get_chat_template()


# The template is an argument of what is cached because it can be changed on a tokenizer.


@lru_cache(maxsize=4096)
def _literals(
    tokenizer: Any, template: str, roles: tuple[str, ...], generation_prompt: bool
) -> tuple[str, ...]:
    """What is written before each turn, and after the last. [len(roles) + 1]"""
    turns = [Turn(role, f"\ue000{i}\ue001") for i, role in enumerate(roles)]
    text = chat_text(tokenizer, turns, generation_prompt=generation_prompt)
    literals = re.split("\ue000([0-9]+)\ue001", text)
    if literals[1::2] != [str(i) for i in range(len(roles))]:
        raise ValueError(
            f"The chat template of {tokenizer.name_or_path!r} does not write each of the turns "
            f"{', '.join(roles)} once and in order, so that the replies cannot be located."
        )
    return tuple(sys.intern(literal) for literal in literals[::2])


@lru_cache(maxsize=4096)
def _frame(tokenizer: Any, template: str, roles: tuple[str, ...]) -> _Frame:
    literals = _literals(tokenizer, template, roles, False)
    prompt = _literals(tokenizer, template, roles[:-1], True)
    header = literals[-2]
    if prompt[:-1] != literals[:-2] or not header.startswith(prompt[-1]):
        raise ValueError(
            f"The chat template of {tokenizer.name_or_path!r} ends a prompt with {prompt[-1]!r}, "
            f"but writes {header!r} before the reply to it: its texts are not what a server "
            "generates. Use a template that keeps replies as they were generated."
        )
    # Llama 2's prompt ends before the space that begins the reply. Any other text that the prompt
    # lacks (a role marker, an empty thought) is the template's and no part of the reply.
    lead = header[len(prompt[-1]) :]
    end = _end_of_turn(tokenizer, literals[-1])
    return _Frame(literals, lead=len(lead) if lead.isspace() else 0, end=end[1] if end else 0)


def _end_of_turn(tokenizer: Any, after: str) -> tuple[int, int] | None:
    """The first marker after a reply: its id, and where it ends."""
    encoding = encode(tokenizer, [after])[0]
    markers = tokenizer.added_tokens_decoder  # not all templates use a special token here
    for token, (_, end) in zip(encoding.ids, encoding.offsets, strict=True):
        if token in markers and markers[token].content.strip():
            return token, end
    return None


@lru_cache(maxsize=4096)
def _keeps_history(tokenizer: Any, template: str, roles: tuple[str, ...]) -> bool:
    """Whether each reply still stands as it was generated when more turns follow."""
    literals = _literals(tokenizer, template, roles, False)
    for k in _replies(roles):
        earlier = _frame(tokenizer, template, roles[: k + 1])
        if earlier.literals[: k + 1] != literals[: k + 1]:
            return False
        if not literals[k + 1].startswith(earlier.literals[k + 1][: earlier.end]):
            return False
    return True


@lru_cache(maxsize=64)
def _takes_system(tokenizer: Any, template: str) -> bool:
    try:
        _literals(tokenizer, template, ("system", "user", "assistant"), False)
    except (TemplateError, ValueError):  # it refuses the role, or leaves the text out
        return False
    return True


@lru_cache(maxsize=64)
def _control_tokens(tokenizer: Any, template: str) -> frozenset[int]:
    after = _literals(tokenizer, template, ("user", "assistant"), False)[-1]
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    end = _end_of_turn(tokenizer, after)
    return frozenset(special | ({end[0]} if end else set()))


def _replies(roles: Sequence[str]) -> list[int]:
    return [i for i, role in enumerate(roles) if role == "assistant"]


# --- the turns in it ---------------------------------------------------------------------------


def _last_reply(tokenizer: Any, name: str, turns: Sequence[Turn], frame: _Frame) -> ChatText | None:
    """The text up to a reply, which alone is supervised."""
    text = chat_text(tokenizer, turns)
    if spans := _locate(text, frame.literals, turns):
        start, end = spans[-1]
        return ChatText(name, text, spans, [(start - frame.lead, end + frame.end)])
    # The template changes the text of these turns; it moves thoughts about, say. What was generated
    # is still what comes after the prompt. But a control token written out in a turn cannot be
    # told from the template's own now.
    prompt = chat_text(tokenizer, turns[:-1], generation_prompt=True)
    start, end = len(prompt), len(text) - len(frame.literals[-1])
    if start >= end or not text.startswith(prompt) or not text.endswith(frame.literals[-1]):
        return None
    markers = [tokenizer.added_tokens_decoder[id].content for id in control_tokens(tokenizer)]
    if any(marker in turn.text for marker in markers for turn in turns):
        return None
    # If the change is in another turn, then what the template writes before this one is its own.
    for written in _trimmed(turns[-1].text):
        if text.endswith(frame.literals[-2] + written, 0, end):
            start = end - len(written) - frame.lead
            break
    return ChatText(name, text, [], [(start, end + frame.end)])


def _locate(text: str, literals: Sequence[str], turns: Sequence[Turn]) -> list[Span]:
    """Where each turn is, given what is around them; empty if `text` is anything else."""
    if not text.startswith(literals[0]):
        return []
    spans: list[Span] = []
    at = len(literals[0])
    for turn, literal in zip(turns, literals[1:], strict=True):
        for written in _trimmed(turn.text):
            end = at + len(written)
            if text.startswith(written, at) and text.startswith(literal, end):
                break
        else:
            return []
        spans.append((at, end))
        at = end + len(literal)
    return spans if at == len(text) else []


def _trimmed(text: str) -> Iterator[str]:
    """What templates make of a turn's text."""
    yield text
    for trim in (str.strip, str.rstrip, str.lstrip):
        yield trim(text)
        yield trim(text, "\n")
