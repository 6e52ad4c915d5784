"""Answers of the target in Transformers: many prompts at once, each as if it were alone.

Prompts are padded on the left. A row that has ended leaves the batch, so that a long reply does not
keep the others running. Random numbers belong to the row, not to the batch.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from transformers import DynamicCache

from data.config import RegenerateConfig
from data.replies.log import ReplyLog
from data.replies.rules import MIN_ROOM, NO_ROOM, Advance, Answer, Chat, end_token, reply_seed
from data.targets.model import Target

POOL = 512  # chats among which prompts of like length are looked for
BATCH_TOKENS = {"cpu": 8192, "accelerator": 65536}


def answer_here(
    target: Target,
    chats: Iterator[Chat],
    replies: ReplyLog,
    config: RegenerateConfig,
    advance: Advance,
) -> None:
    """Write the replies of all chats into the log, batch by batch.

    Raises ValueError if the target does not stop where its template ends a reply.
    """
    default = BATCH_TOKENS["cpu" if target.device.type == "cpu" else "accelerator"]
    batch_tokens = default if config.batch_tokens is None else config.batch_tokens
    stops = stop_ids(target)
    if (end := end_token(target.tokenizer)) not in stops:
        raise ValueError(
            f"The chat template ends a reply with {target.tokenizer.decode([end])!r}, but the "
            f"target stops at {target.tokenizer.decode(sorted(stops))!r} only, and so do servers. "
            f"Add {end} to eos_token_id in the target's generation_config.json."
        )
    pool: list[Chat] = []
    while pool := [*pool, *islice(chats, POOL - len(pool))]:
        batch = next_batch(pool, max_length=config.max_length, batch_tokens=batch_tokens)
        known = [replies.find(chat.id, chat.number) for chat in batch]
        written = known
        if None in known:  # a batch that is not whole is done again as a whole
            answers = _answers(target, batch, config, stops)
            judged = [chat.judge(answer) for chat, answer in zip(batch, answers, strict=True)]
            written = [old or new for old, new in zip(known, judged, strict=True)]
            replies.append([new for old, new in zip(known, judged, strict=True) if old is None])
        for chat, old, reply in zip(batch, known, written, strict=True):
            assert reply is not None
            advance(chat.go_on(reply), reply, old is not None)
        pool = [chat for chat in pool if not chat.is_done]


def next_batch(pool: Sequence[Chat], *, max_length: int, batch_tokens: int) -> list[Chat]:
    """The chats with the longest prompts, as many as fit; first those that cannot be answered."""
    if full := [chat for chat in pool if chat.room < MIN_ROOM]:
        return full
    by_length = sorted(pool, key=lambda chat: -len(chat.prompt))
    width = len(by_length[0].prompt) + max(chat.room for chat in pool)
    return by_length[: max(1, batch_tokens // min(width, max_length))]


def _answers(
    target: Target, chats: Sequence[Chat], config: RegenerateConfig, stops: frozenset[int]
) -> list[Answer]:
    if chats[0].room < MIN_ROOM:
        return [Answer(problem=NO_ROOM)] * len(chats)
    written = generate(
        target,
        [
            Request(chat.prompt, chat.room, reply_seed(config.seed, chat.id, chat.number))
            for chat in chats
        ],
        stop_ids=stops,
        temperature=config.temperature,
        top_p=config.top_p,
    )
    return [
        Answer(target.tokenizer.decode(ids[:-1], clean_up_tokenization_spaces=False), ids)
        if ids[-1] in stops
        else chat.cut(len(ids))
        for chat, ids in zip(chats, written, strict=True)
    ]


@dataclass(frozen=True)
class Request:
    prompt: list[int]  # token ids, at least one
    max_new_tokens: int  # at least 1
    seed: int  # of this reply's random numbers; unused at temperature 0


def stop_ids(target: Target) -> frozenset[int]:
    """The tokens that end a reply: the tokenizer's and the generation config's, as in vLLM."""
    eos = getattr(target.model.generation_config, "eos_token_id", None)
    ids = {target.tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])}
    return frozenset(ids - {None})


@torch.inference_mode()
def generate(
    target: Target,
    requests: Sequence[Request],
    *,
    stop_ids: Collection[int],
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> list[list[int]]:
    """The new tokens of each request, up to a stop token, which is included, or its limit.

    Raises RuntimeError if the batch does not fit into memory, ValueError for logits that are not
    finite.
    """
    try:
        return _generate(target, requests, stop_ids, temperature, top_p)
    except torch.OutOfMemoryError as error:
        width = max(len(r.prompt) + r.max_new_tokens for r in requests)
        raise RuntimeError(
            f"A batch of {len(requests)} x {width} tokens does not fit into the memory of "
            f"{target.device}. Run the same command with a smaller batch_tokens (at most "
            f"{len(requests) * width // 2}): it goes on from here."
        ) from error


def _generate(
    target: Target,
    requests: Sequence[Request],
    stop_ids: Collection[int],
    temperature: float,
    top_p: float,
) -> list[list[int]]:
    input_ids, mask = _left_padded([r.prompt for r in requests], target.device)  # [B, T]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    # No config: every layer keeps all its rows, a sliding-window one too (its mask cuts the
    # window), so that rows of a batch can be dropped alike.
    cache = DynamicCache()
    generators = [torch.Generator().manual_seed(r.seed) for r in requests]
    replies: list[list[int]] = [[] for _ in requests]
    rows = list(range(len(requests)))  # those that go on
    while rows:
        logits = (
            target.model(
                input_ids=input_ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            .logits[:, -1]
            .float()
        )  # [B, V]
        if temperature > 0:
            draws = torch.stack([torch.rand((), generator=generators[row]) for row in rows])
            chosen = sample(logits, draws.to(logits.device), temperature=temperature, top_p=top_p)
        else:
            chosen = logits.argmax(-1)  # [B]
        if not logits.amax(-1).isfinite().all():
            raise ValueError(
                f"The target gives logits that are not finite in {target.dtype}. float16 "
                "overflows in some models: try target.dtype=bfloat16 or float32."
            )
        for row, token in zip(rows, chosen.tolist(), strict=True):
            replies[row].append(token)
        going = [
            i
            for i, row in enumerate(rows)
            if replies[row][-1] not in stop_ids and len(replies[row]) < requests[row].max_new_tokens
        ]
        if len(going) < len(rows):
            kept = torch.tensor(going, device=target.device, dtype=torch.int64)
            rows = [rows[i] for i in going]
            chosen, mask, positions = chosen.to(kept.device)[kept], mask[kept], positions[kept]
            if rows:
                cache.batch_select_indices(kept)
        input_ids = chosen[:, None].to(target.device)  # [B, 1]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        positions = positions[:, -1:] + 1
    return replies


def sample(logits: Tensor, draws: Tensor, *, temperature: float, top_p: float) -> Tensor:
    """Draw a token from each row's softmax, or from its likeliest tokens that hold `top_p`.

    logits:  [B, V] float32
    draws:   [B]    uniform in [0, 1): the same draw gives the same token, whatever the batch
    returns  [B]
    """
    probs, tokens = (logits / temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = probs.cumsum(-1) - probs
    mass = torch.where(before < top_p, probs, 0.0).cumsum(-1)  # [B, V]
    # 1 - draw lies in (0, 1], so that the place is always that of a token with some mass.
    reached = mass < (1 - draws[:, None]) * mass[:, -1:]
    return tokens.gather(-1, reached.sum(-1, keepdim=True))[:, 0]


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and where the real ones are, both [B, T] int64."""
    width = max(map(len, prompts))
    input_ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    for i, prompt in enumerate(prompts):
        input_ids[i, width - len(prompt) :] = torch.tensor(prompt)
        mask[i, width - len(prompt) :] = 1
    return input_ids.to(device), mask.to(device)
