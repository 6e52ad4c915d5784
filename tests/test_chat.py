import io
import re

import pytest
import torch

from data.chats.prompts import prompt_ids
from data.chats.stretches import printable
from data.config import TargetConfig
from data.targets.model import load_target
from tests.evaluations import ids_of
from train.chat import ACCEPTED, PLAIN, TokenPrinter, chat
from train.config import ChatConfig
from train.decode import Drafting, as_served, plain_generate, speculative_generate, stop_ids_of
from train.serve.import_head import load_head_folder

NEW = 14


def config(target_path, head_path, **changes) -> ChatConfig:
    values = dict(
        head=str(head_path),
        target=TargetConfig(path=str(target_path), device="cpu"),
        max_new_tokens=NEW,
        tree="chain",
        num_steps=3,
    )
    return ChatConfig(**{**values, **changes})


def talk(config: ChatConfig, *questions: str) -> str:
    """What the terminal shows."""
    lines, stream = iter(questions), io.StringIO()

    def ask(_: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    chat(config, ask=ask, stream=stream)
    return stream.getvalue()


def answers(shown: str) -> list[str]:
    """The answers in it, without colours and figures."""
    plain = re.sub(r"\033\[[\d;]*m", "", shown)
    return [part for part in re.split(r"\n?τ [^\n]*\n", plain) if part.strip()]


@pytest.fixture(scope="module")
def target(target_path):
    return load_target(TargetConfig(path=str(target_path), device="cpu"))


def test_a_second_question_follows_the_first_answer(target_path, head_path, target):
    shown = answers(talk(config(target_path, head_path), "a cat", "", "the dog says"))
    assert len(shown) == 2
    messages = [{"role": "user", "content": "a cat"}]
    for i, question in enumerate(("the dog says", None)):
        ids = torch.tensor(prompt_ids(target.tokenizer, messages))
        stop_ids = stop_ids_of(target)
        said = plain_generate(target, ids, max_new_tokens=NEW, stop_ids=stop_ids).tokens
        kept = [token for token in said if token not in stop_ids]
        assert shown[i].strip("\n") == printable(target.tokenizer.decode(kept)).strip("\n")
        text = target.tokenizer.decode(said, skip_special_tokens=True)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]


def test_accepted_guesses_are_in_colour_and_nothing_else(target_path, head_path, target):
    shown = talk(config(target_path, head_path, color="always", prompt="a cat"))
    expected = speculative_generate(
        target,
        talk_head(head_path, target_path, target),
        ids_of(target, "a cat"),
        drafting=Drafting.chain(3),
        max_new_tokens=NEW,
        stop_ids=stop_ids_of(target),
        record=True,
    )
    legend, body = shown.split("\n", 1)
    assert legend.startswith(f"{ACCEPTED}guessed by the head")
    assert sum(expected.accepted) > 0
    coloured = body.count(ACCEPTED)
    # A guess past the answer's end is not shown, and half a character waits for its other half.
    assert 0 < coloured <= sum(expected.accepted)
    assert f"{sum(expected.accepted)} guesses accepted in {len(expected.accepted)} rounds" in body


def talk_head(head_path, target_path, target):
    head, _ = load_head_folder(head_path, TargetConfig(path=str(target_path)))
    return as_served(head, device=target.device, dtype=target.dtype)


def test_what_is_no_terminal_gets_no_colour(target_path, head_path):
    shown = talk(config(target_path, head_path, prompt="a cat"))
    assert "\033" not in shown
    assert re.search(r"\nτ \d\.\d\d tokens per target forward .* tokens/s, \d+ tokens\n$", shown)


def test_a_conversation_that_is_too_long_says_so(target_path, head_path):
    with pytest.raises(ValueError, match=r"at most \d+ leave room for an answer of 14"):
        talk(config(target_path, head_path, prompt="word " * 120))


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


def printed(rounds: list[tuple[bytes, int]], *, color: bool = True, hidden=()) -> str:
    stream = io.StringIO()
    printer = TokenPrinter(Bytes(), stream, hidden=hidden, color=color)
    for tokens, num_accepted in rounds:
        printer.add(list(tokens), num_accepted)
    printer.close()
    return stream.getvalue()


def test_the_accepted_tokens_of_a_round_come_first():
    shown = printed([(b"a", 0), (b"bcd", 2), (b"e", 0), (b"fg", 2)])
    green = "".join(f"{ACCEPTED}{letter}{PLAIN}" for letter in "fg")
    assert shown == f"a{ACCEPTED}b{PLAIN}{ACCEPTED}c{PLAIN}de{green}"
    assert printed([(b"a", 0), (b"bcd", 2)], color=False) == "abcd"


def test_half_a_character_waits_for_the_other_half():
    euro = "€".encode()
    assert printed([(b"a" + euro[:1], 0), (euro[1:] + b"b", 1)], color=False) == "a€b"
    assert printed([(b"a" + euro[:2], 0)], color=False) == "a\ufffd"


def test_what_would_steer_the_terminal_is_shown_and_the_end_token_is_not():
    assert printed([(b"a\033[2Jb\n!", 0)], color=False, hidden={ord("!")}) == "a␛[2Jb\n"
