"""A conversation whose replies are written anew, and the rule for which of them are kept.

The target answers the user's turns in order; its own answers are the history. A conversation ends
before the first reply that the dump could not show as it was generated:

    reply longer than max_new_tokens         it has no end, and the dump would supervise a false one
    reply that max_length leaves no room for
    blank reply
    reply that the template does not         the dump's tokens are not those that were generated:
      reproduce                                spelled otherwise, trimmed, ended by another token
    what an endpoint refuses or changes      see data/replies/endpoint.py

Thoughts are part of the text that was generated, and are stored in it. Whether a template that
takes them out of earlier turns gives them back in the reply's own sequence is what the check finds.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from data.chats.conversations import Conversation, Turn
from data.chats.prompts import prompt_ids
from data.chats.rendering import TokenSequence, render
from data.chats.template import chat_text, fold_system, takes_system

LONG = "reply longer than max_new_tokens"
NO_ROOM = "reply that max_length leaves no room for"
BLANK = "blank reply"
NOT_REPRODUCED = "reply that the template does not reproduce"
MIN_ROOM = 2  # tokens: one of text, and the end-of-turn token


@dataclass(frozen=True)
class Answer:
    """What was written after a prompt."""

    text: str = ""
    ids: list[int] | None = None  # its end-of-turn token included; None: the server did not say
    tokens: int = 0  # what the server counted, if it did not say which
    problem: str | None = None  # why the reply cannot be kept


@dataclass(frozen=True)
class Reply:
    """An answer that was looked at, as the log keeps it."""

    id: str  # of the conversation
    number: int  # in it, from 0
    text: str
    tokens: int
    checked: bool  # the dump's tokens of it are those that were generated
    problem: str | None  # the conversation ends before it


# Told of each reply: how many fewer are to come, the reply, and whether the log had it already.
Advance = Callable[[int, Reply, bool], None]


class Chat:
    """A conversation that is being answered."""

    def __init__(
        self, conversation: Conversation, tokenizer: Any, *, max_new_tokens: int, max_length: int
    ) -> None:
        self.id = conversation.id
        self.turns: list[Turn] = []  # so far; ends with the user's turn that is to be answered
        self.number = 0  # of the next reply
        self.prompt: list[int] = []  # token ids
        self._tokenizer = tokenizer
        self._max_new_tokens, self._max_length = max_new_tokens, max_length
        self._waiting = [turn for turn in conversation.turns if turn.role != "assistant"][::-1]
        self.num_replies = sum(turn.role == "user" for turn in self._waiting)  # still to come
        self._ask()

    @property
    def is_done(self) -> bool:
        return not self.num_replies

    @property
    def messages(self) -> list[dict[str, str]]:
        """What a server is sent."""
        return [{"role": t.role, "content": t.text} for t in self._folded(self.turns)]

    @property
    def room(self) -> int:
        """Most tokens that the next reply may have; below MIN_ROOM it cannot be had."""
        return min(self._max_new_tokens, self._max_length - len(self.prompt))

    def cut(self, tokens: int) -> Answer:
        """An answer that did not end in the room that there was."""
        is_long = self.room == self._max_new_tokens
        return Answer(tokens=tokens, problem=LONG if is_long else NO_ROOM)

    def judge(self, answer: Answer) -> Reply:
        """What is to be kept of the answer."""
        problem, text = answer.problem, ""
        if not problem and not answer.text.strip():
            problem = BLANK
        if not problem:
            # Where the template writes the space before a reply, the reply must not bring its own.
            texts = (answer.text, answer.text.removeprefix(" "), answer.text.strip())
            shown = (text for text in dict.fromkeys(texts) if self._reproduces(text, answer))
            text = next(shown, "")
            problem = None if text else NOT_REPRODUCED
        tokens = answer.tokens if answer.ids is None else len(answer.ids)
        is_checked = answer.ids is not None and problem is None
        return Reply(self.id, self.number, text, tokens, is_checked, problem)

    def go_on(self, reply: Reply) -> int:
        """Take the reply to the last user turn. Returns how many replies fewer are to come."""
        left = self.num_replies
        self.number += 1
        self.num_replies = 0 if reply.problem else left - 1
        if not self.is_done:
            self.turns.append(Turn("assistant", reply.text))
            self._ask()
        return left - self.num_replies

    def _ask(self) -> None:
        if self._waiting[-1].role == "system":
            self.turns.append(self._waiting.pop())
        self.turns.append(self._waiting.pop())
        self.prompt = prompt_ids(self._tokenizer, self.messages)

    def _reproduces(self, text: str, answer: Answer) -> bool:
        """Whether the dump of `text` is the prompt and what was generated after it."""
        if "\0" in text:  # the reader removes it
            return False
        turns = [*self.turns, Turn("assistant", text)]
        if answer.ids is None:
            prompt = chat_text(self._tokenizer, self._folded(self.turns), generation_prompt=True)
            whole = chat_text(self._tokenizer, self._folded(turns))
            if not whole.startswith(prompt + answer.text):
                return False
        conversation = Conversation(self.id, tuple(turns))
        sequences = render(self._tokenizer, conversation, max_length=self._max_length)
        if not sequences:
            return False
        *_, last = replies_in(sequences)
        shown = sequences[-1].input_ids[: len(self.prompt) + len(last)]
        return shown == self.prompt + last and answer.ids in (None, last)

    def _folded(self, turns: Sequence[Turn]) -> Sequence[Turn]:
        return turns if takes_system(self._tokenizer) else fold_system(turns)


def replies_in(sequences: list[TokenSequence]) -> Iterator[list[int]]:
    """The token ids of each supervised reply."""
    for sequence in sequences:
        reply: list[int] = []
        for token, is_reply in zip(sequence.input_ids, sequence.loss_mask, strict=True):
            if is_reply:
                reply.append(token)
            elif reply:
                yield reply
                reply = []
        if reply:
            yield reply


def end_token(tokenizer: Any) -> int:
    """What ends a reply in the target's template.

    Raises ValueError for a template that would not give back any reply as it was generated.
    """
    turns = (Turn("user", "Hello"), Turn("assistant", "Yes."))
    conversation = Conversation("", turns)
    chat = Chat(conversation, tokenizer, max_new_tokens=512, max_length=4096)
    ids = next(replies_in(render(tokenizer, conversation, max_length=4096)), [])
    text = tokenizer.decode(ids[:-1], clean_up_tokenization_spaces=False)
    if chat.judge(Answer(text, ids)).problem:
        raise ValueError(
            f"The chat template of {tokenizer.name_or_path!r} does not give a reply back as it "
            f"was generated: {chat_text(tokenizer, turns)!r} must hold the tokens of the prompt "
            f"{chat_text(tokenizer, turns[:1], generation_prompt=True)!r}, then those of the reply "
            "'Yes.' and one token that ends it. No reply could be used."
        )
    return ids[-1]


def reply_seed(seed: int, name: str, number: int) -> int:
    """The seed of one reply: of nothing but the run's seed, the conversation and its number."""
    digest = hashlib.blake2b(f"{seed}:{number}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 33  # 31 bits, which every server takes
