"""The generation loops, with a head and without: the same machinery, the same answers."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import overload

import torch
from torch import Tensor

from data.targets.model import Target
from train.decode.answers import Answer, Generation, uniforms
from train.decode.clock import Clock
from train.decode.drafting import Drafting
from train.decode.head_stream import HeadStream
from train.decode.rounds import check_kind, confirm, draft_tree, record_rounds, verify
from train.decode.sampling import GREEDY, Sampling
from train.decode.stops import Stops
from train.decode.target_stream import TargetStream
from train.decode.tree import padded
from train.head import DraftHead

OnRound = Callable[[list[int], int], None]  # the round's new tokens, and how many were drafted


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
    record:    keep each round's tree in `Generation.rounds`
    on_round:  called with the new tokens of each round and how many of its drafts were accepted,
               the first time with the token of the prefill and 0; for one prompt only

    Greedy answers are those of plain decoding. Samples have its distribution, unless
    `sampling.typical` is set; with the likeliest tokens as children (the default) they even are
    the samples of plain decoding with the same seed.

    In each round a sequence is x_0 ... x_L; the target has seen all but x_L, the root. The head
    drafts a tree behind it, the target runs root and tree, and what it confirms is the next
    round's real pairs. The device is waited for once a round, to learn what that is.
    """
    stops = Stops(
        max_new_tokens=max_new_tokens,
        ids=stop_ids,
        strings=stop_strings,
        tokenizer=target.tokenizer,
    )
    prompts = _prompts(input_ids)
    check_kind(drafting, sampling)
    if on_round and len(prompts) > 1:
        raise ValueError(f"on_round follows one prompt, but {len(prompts)} were given.")
    answers = [
        Answer(stops, sampling, index=i, ahead=drafting.num_steps) for i in range(len(prompts))
    ]
    active = answers
    clock = Clock(target.device)
    stream = TargetStream(target, len(prompts))
    head_stream = HeadStream(
        head,
        target.head,
        batch_size=len(prompts),
        capacity=max(map(len, prompts)) + max_new_tokens + drafting.num_columns,
    )

    with clock.phase("prefill"):
        features, newest = _prefill(target, stream, prompts, active, sampling)  # [B, T, H], [B]
        confirmed = [[token] for token in newest.tolist()]
    counts = [len(prompt) for prompt in prompts]
    pairs = [[*p[1:], *new] for p, new in zip(prompts, confirmed, strict=True)]  # t_{j+1}

    while True:
        rows = [row for row, answer in enumerate(active) if not answer.extend(confirmed[row])]
        if on_round:
            on_round(answers[0].latest, len(confirmed[0]) - 1)
        if not rows:
            break
        if len(rows) < len(active):
            active = [active[row] for row in rows]
            counts, pairs = [counts[row] for row in rows], [pairs[row] for row in rows]
            features, newest = features[rows, : max(counts)], newest[rows]
            stream.keep_rows(rows)
            head_stream.keep_rows(rows)
        generators = [answer.generator for answer in active]

        with clock.phase("draft"):
            hidden = head_stream.extend(features, padded(pairs, target.device), counts)  # [B, H]
            tree = draft_tree(drafting, sampling, head_stream, hidden, newest, generators)
        with clock.phase("verify"):
            features = stream.try_tree(tree)  # [B, N, H]
            verdict = verify(
                tree,
                target.head.logits(features),
                sampling,
                uniforms=partial(uniforms, active),
                generators=generators,
            )
            outcome = confirm(tree, verdict)

        stream.keep(outcome.paths, width=tree.tokens.shape[1])
        path = padded(outcome.paths, target.device)  # [B, D]
        features = features.gather(1, path[:, :, None].expand(-1, -1, features.shape[-1]))
        newest, confirmed = verdict.bonus, outcome.tokens
        pairs, counts = confirmed, [len(new) for new in confirmed]
        for answer, count in zip(active, counts, strict=True):
            answer.accepted.append(count - 1)
        if record:
            for answer, one in zip(active, record_rounds(tree, outcome), strict=True):
                answer.rounds.append(one)
    seconds = clock.seconds()
    found = [answer.generation(seconds) for answer in answers]
    return found if isinstance(input_ids, list) else found[0]


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
    """Continue a prompt [T], or a batch of prompts, one token a forward.

    Prompt i of a batch samples from random numbers of its own, whatever the others do.
    """
    stops = Stops(
        max_new_tokens=max_new_tokens,
        ids=stop_ids,
        strings=stop_strings,
        tokenizer=target.tokenizer,
    )
    prompts = _prompts(input_ids)
    answers = [Answer(stops, sampling, index=i) for i in range(len(prompts))]
    active = answers
    clock = Clock(target.device)
    stream = TargetStream(target, len(prompts))
    with clock.phase("prefill"):
        _, newest = _prefill(target, stream, prompts, active, sampling)  # [B]
        confirmed = newest.tolist()
    while True:
        rows = [row for row, answer in enumerate(active) if not answer.extend([confirmed[row]])]
        if not rows:
            break
        if len(rows) < len(active):
            active, newest = [active[row] for row in rows], newest[rows]
            stream.keep_rows(rows)
        with clock.phase("verify"):
            logits = target.head.logits(stream.append(newest[:, None])[:, 0])  # [B, V]
            newest = _choose(logits, active, sampling)
            confirmed = newest.tolist()
    seconds = clock.seconds()
    found = [answer.generation(seconds) for answer in answers]
    return found if isinstance(input_ids, list) else found[0]


def _prefill(
    target: Target,
    stream: TargetStream,
    prompts: list[list[int]],
    answers: list[Answer],
    sampling: Sampling,
) -> tuple[Tensor, Tensor]:
    """Features of the prompts [B, T, H], padded on the right, and the answers' first tokens [B]."""
    lengths = [len(prompt) for prompt in prompts]
    features = stream.append(padded(prompts, target.device), lengths)
    last = features[range(len(prompts)), [length - 1 for length in lengths]]  # [B, H]
    return features, _choose(target.head.logits(last), answers, sampling)


def _choose(logits: Tensor, answers: list[Answer], sampling: Sampling) -> Tensor:
    """The next token of each answer: [B, V] -> [B]."""
    next_token = torch.zeros(len(answers), 1, dtype=torch.long, device=logits.device)
    return sampling.choose(logits, uniforms(answers, next_token)[:, 0])


def _prompts(input_ids: Tensor | list[Tensor]) -> list[list[int]]:
    prompts = input_ids if isinstance(input_ids, list) else [input_ids]
    if not prompts:
        raise ValueError("No prompt was given: expected at least one.")
    for ids in prompts:
        if ids.dim() != 1 or not len(ids):
            raise ValueError(
                f"input_ids has shape {tuple(ids.shape)}; expected [T] with at least one token."
            )
    return [ids.tolist() for ids in prompts]
