"""The generation loops, with a head and without: the same machinery, the same tokens."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import overload

import torch
from torch import Tensor

from data.target import Target
from train.decode.chain import DraftCache, draft_chain
from train.decode.clock import Clock, Seconds
from train.decode.drafting import Drafting
from train.decode.sampling import GREEDY, Sampling
from train.decode.stops import Stops
from train.decode.verify import TargetStream, count_accepted
from train.head import DraftHead

OnRound = Callable[[list[int], int], None]  # the round's new tokens, and how many were drafted


@dataclass(frozen=True)
class Round:
    """One draft tree and what the target accepted of it. Node 0 is the newest token, the root."""

    tokens: list[int]
    parents: list[int]  # -1 of the root; a parent comes before its children
    depths: list[int]
    confidences: list[float]  # the head's probability of the node given its parent; 1 of the root
    ranks: list[int]  # which child of its parent: 0 is the head's likeliest (or first drawn) token
    path: list[int]  # the accepted nodes from the root on, the root left out
    bonus: int  # the target's own token after the last of them


@dataclass(frozen=True)
class Generation:
    """What one prompt was answered with."""

    tokens: list[int]  # the stop token included, if one was reached
    seconds: Seconds
    # Accepted draft tokens of each verification, before the answer is cut at a stop token or at
    # max_new_tokens, as vLLM counts. The first token comes from the prefill and is no round.
    accepted: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)  # if they were to be recorded


@overload
def speculative_generate(
    target: Target,
    head: DraftHead,
    input_ids: Tensor,
    *,
    drafting: Drafting,
    sampling: Sampling = ...,
    max_new_tokens: int,
    stop_ids: Collection[int],
    stop_strings: Sequence[str] = ...,
    record: bool = ...,
    on_round: OnRound | None = ...,
) -> Generation: ...
@overload
def speculative_generate(
    target: Target,
    head: DraftHead,
    input_ids: list[Tensor],
    *,
    drafting: Drafting,
    sampling: Sampling = ...,
    max_new_tokens: int,
    stop_ids: Collection[int],
    stop_strings: Sequence[str] = ...,
    record: bool = ...,
) -> list[Generation]: ...
@torch.inference_mode()
def speculative_generate(
    target: Target,
    head: DraftHead,
    input_ids: Tensor | list[Tensor],
    *,
    drafting: Drafting,
    sampling: Sampling = GREEDY,
    max_new_tokens: int,
    stop_ids: Collection[int],
    stop_strings: Sequence[str] = (),
    record: bool = False,
    on_round: OnRound | None = None,
) -> Generation | list[Generation]:
    """Continue a prompt, or a batch of prompts, as `plain_generate` does, with fewer forwards.

    input_ids: [T]  a prompt of at least one token; or a list of such
    on_round:  called with the new tokens of each round and how many of its drafts were accepted,
               the first time with the token of the prefill and 0; for one prompt only
    record:    keep each round's tree in `Generation.rounds`
    """
    stops = Stops(
        max_new_tokens=max_new_tokens,
        ids=stop_ids,
        strings=stop_strings,
        tokenizer=target.tokenizer,
    )
    prompts = _checked(input_ids)
    if drafting.tree != "chain" or drafting.children != "top" or sampling.typical:
        raise NotImplementedError(f"{drafting} with {sampling}")
    answers = [
        _answer(target, head, prompt, i, drafting, sampling, stops, record, on_round)
        for i, prompt in enumerate(prompts)
    ]
    return answers if isinstance(input_ids, list) else answers[0]


def _answer(target, head, input_ids, index, drafting, sampling, stops, record, on_round):
    input_ids = input_ids.to(target.device)
    num_steps = drafting.num_steps
    uniforms = sampling.stream(index, stops.max_new_tokens + num_steps + 1, target.device)
    clock = Clock(target.device)
    stream = TargetStream(target)
    cache = DraftCache(head, len(input_ids) + stops.max_new_tokens + num_steps)

    with clock.phase("prefill"):
        features = stream.append(input_ids)  # [L, H]
        newest = sampling.choose(target.head.logits(features[-1:]), uniforms[:1])  # x_L: [1]
        tokens: list[int] = []
        finished = stops.extend(tokens, newest.tolist())
    pair_tokens = torch.cat([input_ids[1:], newest])  # [L]
    if on_round:
        on_round(list(tokens), 0)

    accepted, rounds = [], []
    while not finished:
        done = len(tokens)
        with clock.phase("draft"):
            drafted, confidences = draft_chain(
                head, target.head, cache, features, pair_tokens, num_steps=num_steps
            )  # [K]
        with clock.phase("verify"):
            features = stream.append(torch.cat([newest, drafted]))  # [K+1, H]
            predicted = sampling.choose(
                target.head.logits(features), uniforms[done : done + num_steps + 1]
            )  # [K+1]
            on_host = torch.cat([drafted, predicted]).tolist()

        count = count_accepted(on_host[:num_steps], on_host[num_steps:])
        accepted.append(count)
        stream.drop(num_steps - count)
        features, pair_tokens = features[: count + 1], predicted[: count + 1]
        confirmed = on_host[num_steps : num_steps + count + 1]
        if record:
            rounds.append(
                Round(
                    tokens=[tokens[-1], *on_host[:num_steps]],
                    parents=list(range(-1, num_steps)),
                    depths=list(range(num_steps + 1)),
                    confidences=[1.0, *confidences.tolist()],
                    ranks=[0] * (num_steps + 1),
                    path=list(range(1, count + 1)),
                    bonus=confirmed[-1],
                )
            )
        newest = pair_tokens[-1:]
        finished = stops.extend(tokens, confirmed)
        if on_round:
            on_round(tokens[done:], count)
    return Generation(tokens, clock.seconds(), accepted, rounds)


@overload
def plain_generate(
    target: Target,
    input_ids: Tensor,
    *,
    sampling: Sampling = ...,
    max_new_tokens: int,
    stop_ids: Collection[int],
    stop_strings: Sequence[str] = ...,
) -> Generation: ...
@overload
def plain_generate(
    target: Target,
    input_ids: list[Tensor],
    *,
    sampling: Sampling = ...,
    max_new_tokens: int,
    stop_ids: Collection[int],
    stop_strings: Sequence[str] = ...,
) -> list[Generation]: ...
@torch.inference_mode()
def plain_generate(
    target: Target,
    input_ids: Tensor | list[Tensor],
    *,
    sampling: Sampling = GREEDY,
    max_new_tokens: int,
    stop_ids: Collection[int],
    stop_strings: Sequence[str] = (),
) -> Generation | list[Generation]:
    """Continue a prompt [T], or a batch of prompts, one token a forward."""
    stops = Stops(
        max_new_tokens=max_new_tokens,
        ids=stop_ids,
        strings=stop_strings,
        tokenizer=target.tokenizer,
    )
    answers = [
        _plain_answer(target, prompt, i, sampling, stops)
        for i, prompt in enumerate(_checked(input_ids))
    ]
    return answers if isinstance(input_ids, list) else answers[0]


def _plain_answer(target, input_ids, index, sampling, stops):
    uniforms = sampling.stream(index, stops.max_new_tokens, target.device)
    clock = Clock(target.device)
    stream = TargetStream(target)
    newest = input_ids.to(target.device)
    tokens: list[int] = []
    finished = False
    while not finished:
        done = len(tokens)
        with clock.phase("verify" if tokens else "prefill"):
            features = stream.append(newest)
            logits = target.head.logits(features[-1:])
            newest = sampling.choose(logits, uniforms[done : done + 1])  # [1]
            on_host = newest.tolist()
        finished = stops.extend(tokens, on_host)
    return Generation(tokens, clock.seconds())


def _checked(input_ids: Tensor | list[Tensor]) -> list[Tensor]:
    prompts = input_ids if isinstance(input_ids, list) else [input_ids]
    for ids in prompts:
        if ids.dim() != 1 or not len(ids):
            raise ValueError(
                f"input_ids has shape {tuple(ids.shape)}; expected [T] with at least one token."
            )
    return prompts
