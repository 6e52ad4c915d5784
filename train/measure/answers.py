"""Answers to prompt sets, with the head and without, measured one after the other.

An answer, as OUT/answers.jsonl has it:

    set, prompt, turn, category   what was asked; turns are counted from 1
    prompt_ids                    tokens of the whole conversation before the answer
    plain, drafted                tokens; seconds of each phase, of this answer's share of its batch
    drafted                       also: accepted (of each round), rounds (the trees, as `Round`)
    baselines                     name -> tokens, seconds, forwards
    difference                    where plain and drafted first differ, or null
"""

import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from data.chats.prompts import Prompt, prompt_ids
from data.targets.model import Target, check_output_head
from train.acceptance import ChainCounts
from train.decode import (
    Drafting,
    Generation,
    Sampling,
    explain_difference,
    plain_generate,
    speculative_generate,
)
from train.head import DraftHead
from train.measure.answer_log import AnswerLog
from train.measure.baselines import Baseline
from train.measure.summary import PHASES

PromptSets = Mapping[str, Sequence[Prompt]]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """All that decides how a prompt is answered."""

    target: Target
    head: DraftHead
    drafting: Drafting
    sampling: Sampling
    stop_ids: Collection[int]
    max_new_tokens: int
    max_prompt_tokens: int
    batch_size: int
    baselines: Mapping[str, Baseline] = field(default_factory=dict)


@dataclass
class Talk:
    """A conversation as far as it has come."""

    set_name: str
    prompt: Prompt
    messages: list[dict[str, str]]
    ids: Tensor  # [T] of the messages, as a server makes them

    def key(self, turn: int) -> tuple[str, str, int]:
        return self.set_name, self.prompt.id, turn


def measure_answers(setup: Setup, sets: PromptSets, log: AnswerLog) -> list[str]:
    """Answer each turn that the log does not hold yet; a later turn follows the target's answers.

    Returns the prompts, and the turns of prompts, that were left out as too long.
    """
    turns = sum(1 + len(prompt.more_turns) for prompts in sets.values() for prompt in prompts)
    too_long: list[str] = []
    with tqdm(
        total=turns,
        initial=_num_known(sets, log),
        unit="turn",
        desc="decoding",
        dynamic_ncols=True,
        mininterval=1 if sys.stderr.isatty() else 30,  # a log file wants fewer lines
    ) as bar:
        step = partial(_answer_turns, log, _Progress(bar, setup, log))
        number = 0
        for name, group in _groups(sets, setup.batch_size):
            talks = [Talk(name, one, list(one.messages), torch.tensor(())) for one in group]
            for turn in range(1, 2 + max(len(one.more_turns) for one in group)):
                talks = list(_turn(setup, talks, turn, too_long, bar))
                draws = replace(setup.sampling, seed=setup.sampling.seed + number)
                # Who goes first alternates, as the machine may slow down or speed up.
                plain_first = number % 2 == 0
                step(replace(setup, sampling=draws), talks, turn, plain_first=plain_first)
                number += 1
    return too_long


def _num_known(sets: PromptSets, log: AnswerLog) -> int:
    asked = {(name, prompt.id) for name, prompts in sets.items() for prompt in prompts}
    return sum((answer["set"], answer["prompt"]) in asked for answer in log.answers)


def _groups(sets: PromptSets, size: int) -> Iterator[tuple[str, Sequence[Prompt]]]:
    """Prompts that are answered at once. The sets take turns: all see the machine alike."""
    longest = max(map(len, sets.values()))
    for start in range(0, longest, size):
        for name, prompts in sets.items():
            if group := prompts[start : start + size]:
                yield name, group


def _turn(
    setup: Setup, talks: Sequence[Talk], turn: int, too_long: list[str], bar: tqdm
) -> Iterator[Talk]:
    """The conversations that have this turn, with what the user says in it."""
    for talk in talks:
        prompt = talk.prompt
        if turn > 1:
            if turn - 2 >= len(prompt.more_turns):
                continue
            talk.messages.append({"role": "user", "content": prompt.more_turns[turn - 2]})
        talk.ids = torch.tensor(prompt_ids(setup.target.tokenizer, talk.messages))
        if len(talk.ids) <= setup.max_prompt_tokens:
            yield talk
        else:
            where = f"{talk.set_name} {prompt.id}"
            too_long.append(where if turn == 1 else f"{where} turn {turn}")
            bar.update(2 + len(prompt.more_turns) - turn)


def _answer_turns(
    log: AnswerLog,
    progress: "_Progress",
    setup: Setup,
    talks: Sequence[Talk],
    turn: int,
    *,
    plain_first: bool,
) -> None:
    """Answer one turn of some conversations, unless the log holds it, and put the answers in."""
    missing = [talk for talk in talks if log.find(*talk.key(turn)) is None]
    if missing:
        progress.warm_up(missing[0].ids)
        log.append(_measured(setup, missing, turn, plain_first=plain_first))
        progress.update(len(missing))
    for talk in talks:
        known = log.find(*talk.key(turn))
        assert known is not None
        text = setup.target.tokenizer.decode(known["plain"]["tokens"], skip_special_tokens=True)
        talk.messages.append({"role": "assistant", "content": text})


class _Progress:
    """The bar, and what goes before the first answer of a run."""

    def __init__(self, bar: tqdm, setup: Setup, log: AnswerLog) -> None:
        self._bar, self._setup, self._log = bar, setup, log
        self._is_warm = False

    def warm_up(self, ids: Tensor) -> None:
        """Before the clock counts: first calls allocate and compile."""
        if not self._is_warm:
            check_output_head(self._setup.target, ids[None])
            few = replace(self._setup, max_new_tokens=min(4, self._setup.max_new_tokens))
            _both_ways(few, [ids], plain_first=True)
            self._is_warm = True

    def update(self, count: int) -> None:
        rounds = [n for answer in self._log.answers for n in answer["drafted"]["accepted"]]
        counts = ChainCounts.of_rounds(rounds, num_steps=self._setup.drafting.num_steps)
        self._bar.set_postfix_str(f"τ {counts.length:.2f}", refresh=False)
        self._bar.update(count)


def _measured(
    setup: Setup, talks: Sequence[Talk], turn: int, *, plain_first: bool
) -> list[dict[str, Any]]:
    ids = [talk.ids for talk in talks]
    plain, drafted = _both_ways(setup, ids, plain_first=plain_first)
    return [
        dict(zip(AnswerLog.KEY, talk.key(turn), strict=True))
        | {
            "category": talk.prompt.category,
            "prompt_ids": talk.ids.tolist(),
            "plain": without,
            "drafted": with_head,
            "baselines": {name: answer(talk.ids) for name, answer in setup.baselines.items()},
            "difference": _difference(setup, talk.ids, without["tokens"], with_head["tokens"]),
        }
        for talk, without, with_head in zip(talks, plain, drafted, strict=True)
    ]


def _difference(
    setup: Setup, ids: Tensor, plain: list[int], drafted: list[int]
) -> dict[str, Any] | None:
    """Where two answers first differ, and whether it is a near-tie, if that can be looked into."""
    is_quantised = setup.target.fingerprint["quantization"] != "none"
    if setup.sampling.temperature or is_quantised:
        return first_difference(plain, drafted)
    return explain_difference(setup.target, ids, plain, drafted)


def first_difference(plain: list[int], drafted: list[int]) -> dict[str, Any] | None:
    """Where two answers first differ: as `explain_difference` says it, without a reason."""
    if plain == drafted:
        return None
    shorter = min(len(plain), len(drafted))
    place = next((i for i in range(shorter) if plain[i] != drafted[i]), shorter)
    return {
        "position": place,
        "with_head": drafted[place : place + 1],
        "without_head": plain[place : place + 1],
        "logit_gap": None,
        "rounding": None,
        "near_tie": False,
    }


def _both_ways(
    setup: Setup, ids: list[Tensor], *, plain_first: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The plain and the drafted answers to some prompts, in the order that is asked for."""
    common: dict[str, Any] = {
        "sampling": setup.sampling,
        "max_new_tokens": setup.max_new_tokens,
        "stop_ids": setup.stop_ids,
    }

    def plainly() -> list[dict[str, Any]]:
        return _timed(lambda: plain_generate(setup.target, ids, **common))

    def speculatively() -> list[dict[str, Any]]:
        return _timed(
            lambda: speculative_generate(
                setup.target, setup.head, ids, drafting=setup.drafting, record=True, **common
            )
        )

    if plain_first:
        return plainly(), speculatively()
    drafted = speculatively()
    return plainly(), drafted


def _timed(generate: Callable[[], list[Generation]]) -> list[dict[str, Any]]:
    """Answers of one batch, each with its share of the batch's seconds."""
    start = time.perf_counter()
    answers = generate()
    total = time.perf_counter() - start
    found = []
    for answer in answers:
        seconds = {name: getattr(answer.seconds, name) for name in PHASES}
        scale = total / (len(answers) * seconds["total"])
        found.append(
            {
                "tokens": answer.tokens,
                "seconds": {name: scale * value for name, value in seconds.items()},
                "accepted": answer.accepted,
                "rounds": [asdict(one) for one in answer.rounds],
            }
        )
    return found
