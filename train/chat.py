"""A conversation at a terminal that shows which tokens the head has guessed."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

import torch

from data.chats.preview import wants_color
from data.chats.prompts import prompt_ids
from data.chats.stretches import printable
from data.targets.model import Target, load_target
from train.config import ChatConfig
from train.decode import (
    Drafting,
    Generation,
    Sampling,
    as_served,
    speculative_generate,
    stop_ids_of,
)
from train.head import DraftHead
from train.measure.choose_tree import requested
from train.serve.import_head import load_head_folder

ACCEPTED, QUIET, PLAIN = "\033[1;32m", "\033[2m", "\033[0m"
BROKEN = "\ufffd"  # what a decoder makes of half a character


def chat(
    config: ChatConfig, *, ask: Callable[[str], str] = input, stream: TextIO | None = None
) -> None:
    """Answer `config.prompt`, or question after question until the input ends.

    Raises ValueError for a conversation that has become longer than the target has positions.
    """
    stream = stream or sys.stdout
    color = wants_color(config.color, stream)
    talk = Talk.begin(config)
    if color:
        stream.write(f"{ACCEPTED}guessed by the head and accepted{PLAIN}, written by the target\n")
    if config.prompt is not None:
        answer_one(talk, config.prompt, stream, color=color)
        return
    while True:
        try:
            text = ask("\n> ")
        except (EOFError, KeyboardInterrupt):
            stream.write("\n")
            return
        if text.strip():
            answer_one(talk, text, stream, color=color)


@dataclass
class Talk:
    """A conversation, and what it is held with."""

    target: Target
    head: DraftHead
    drafting: Drafting
    sampling: Sampling
    max_new_tokens: int
    messages: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def begin(cls, config: ChatConfig) -> "Talk":
        head, _ = load_head_folder(config.head, config.target)
        target = load_target(config.target)
        return cls(
            target=target,
            head=as_served(head, device=target.device, dtype=target.dtype),
            drafting=requested(
                config.tree,
                num_steps=config.num_steps,
                topk=config.topk,
                num_draft_tokens=config.num_draft_tokens,
            ),
            sampling=Sampling(
                temperature=config.temperature,
                top_p=config.top_p,
                top_k=config.top_k,
                seed=config.seed,
            ),
            max_new_tokens=config.max_new_tokens,
            messages=[{"role": "system", "content": config.system}] if config.system else [],
        )


def answer_one(talk: Talk, text: str, stream: TextIO, *, color: bool) -> None:
    """Write the answer to `text` as it comes, then τ and the speed; both join the conversation."""
    messages = [*talk.messages, {"role": "user", "content": text}]
    ids = torch.tensor(prompt_ids(talk.target.tokenizer, messages))
    _check_length(talk, len(ids))
    stop_ids = stop_ids_of(talk.target)
    printer = TokenPrinter(talk.target.tokenizer, stream, hidden=stop_ids, color=color)
    answer = speculative_generate(
        talk.target,
        talk.head,
        ids,
        drafting=talk.drafting,
        sampling=talk.sampling,
        max_new_tokens=talk.max_new_tokens,
        stop_ids=stop_ids,
        on_round=printer.add,
    )
    printer.close()
    figures = describe(answer)
    stream.write(f"\n{QUIET}{figures}{PLAIN}\n" if color else f"\n{figures}\n")
    stream.flush()
    said = talk.target.tokenizer.decode(answer.tokens, skip_special_tokens=True)
    talk.messages = [*messages, {"role": "assistant", "content": said}]


def describe(answer: Generation) -> str:
    """τ, tokens a second and how they came about, on one line."""
    rounds, tokens = len(answer.accepted), len(answer.tokens)
    length = 1 + sum(answer.accepted) / rounds if rounds else 1.0
    return (
        f"τ {length:.2f} tokens per target forward ({sum(answer.accepted)} guesses accepted in "
        f"{rounds} rounds), {tokens / answer.seconds.total:.1f} tokens/s, {tokens} tokens"
    )


class TokenPrinter:
    """Writes tokens as text the moment they are known, accepted guesses in colour.

    A token may hold half a character: it waits for the other half, and both get its colour.
    """

    def __init__(self, tokenizer, stream: TextIO, *, hidden, color: bool) -> None:
        """hidden: tokens that are not shown, such as the one that ends an answer"""
        self._tokenizer, self._stream = tokenizer, stream
        self._hidden, self._color = frozenset(hidden), color
        self._tokens: list[int] = []
        self._shown = ""

    def add(self, tokens: list[int], num_accepted: int) -> None:
        """One round: its first `num_accepted` tokens were guesses of the head."""
        for i, token in enumerate(tokens):
            if token not in self._hidden:
                self._tokens.append(token)
                self._write(guessed=i < num_accepted, last=False)
        self._stream.flush()

    def close(self) -> None:
        """Write what still waits."""
        self._write(guessed=False, last=True)

    def _write(self, *, guessed: bool, last: bool) -> None:
        text = self._tokenizer.decode(self._tokens)
        if text.endswith(BROKEN) and not last:
            return
        new = printable(text[len(self._shown) :])
        self._shown = text
        if new:
            self._stream.write(f"{ACCEPTED}{new}{PLAIN}" if self._color and guessed else new)


def _check_length(talk: Talk, num_tokens: int) -> None:
    positions = talk.target.model.config.get_text_config().max_position_embeddings
    most = positions - talk.max_new_tokens - talk.drafting.num_steps
    if num_tokens > most:
        raise ValueError(
            f"The conversation has {num_tokens} tokens, but at most {most} leave room for an "
            f"answer of {talk.max_new_tokens} among the target's {positions} positions. Start "
            "anew, or lower max_new_tokens."
        )
