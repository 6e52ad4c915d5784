"""Measure an exported head: acceptance and speed, against plain decoding in the same run."""

import logging
import platform
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from data.prompts import Prompt, prompt_ids, read_prompts
from data.target import Target, check_output_head, fingerprint_differences, load_target
from train.acceptance import ChainCounts
from train.config import EvaluateConfig
from train.decode import (
    Drafting,
    Generation,
    TargetStream,
    as_served,
    plain_generate,
    speculative_generate,
    stop_ids_of,
)
from train.head import DraftHead
from train.report import write_report
from train.serve.engine_config import dtype_name
from train.serve.export import load_exported

log = logging.getLogger(__name__)

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One turn of one prompt, answered with the head and without."""

    prompt: str
    turn: int  # counted from 1
    category: str
    prompt_tokens: int
    plain: Generation
    drafted: Generation
    difference: dict[str, Any] | None  # where the two first differ; see `explain_difference`


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Answer the prompts with the head and without, alternately, and compare.

    Writes OUT/report.json, report.txt and acceptance.png, and returns the report. A target that
    is not the head's own is a warning that names each differing field; ValueError for a target of
    another size, and if no prompt is short enough.
    """
    head, record = load_exported(Path(config.head))
    target = load_target(config.target)
    _check_sizes(head, target, config)
    differences = fingerprint_differences(target.fingerprint, record["fingerprint"])
    for line in differences:
        log.warning("target      is not the one the head was trained for: %s", line)
    head = as_served(head, device=target.device, dtype=target.dtype)

    prompts = read_prompts(Path(config.prompts), limit=config.limit)
    log.info(
        "target      %s in %s on %s", config.target.path, dtype_name(target.dtype), target.device
    )
    log.info("prompts     %d of %s", len(prompts), config.prompts)
    too_long: list[str] = []
    answers = list(_answers(config, target, head, prompts, too_long))
    if not answers:
        raise ValueError(
            f"None of the {len(prompts)} prompts of {config.prompts} has at most "
            f"{_prompt_limit(config, target)} tokens (max_prompt_tokens, and the target's "
            "positions less max_new_tokens)."
        )

    out = Path(config.out) if config.out else Path(config.head) / "evaluation"
    report = _report(config, target, record, answers) | {
        "out": str(out),
        "fingerprint_differences": differences,
        "too_long": too_long,
    }
    write_report(report, out)
    return report


def _answers(
    config: EvaluateConfig,
    target: Target,
    head: DraftHead,
    prompts: list[Prompt],
    too_long: list[str],
) -> Iterator[Answer]:
    """Answer turn by turn; a later turn follows the target's own answer to the one before."""
    limit = _prompt_limit(config, target)
    decode = partial(
        _both_ways, target, head, num_steps=config.num_steps, stop_ids=stop_ids_of(target)
    )
    counts = ChainCounts.zeros(config.num_steps)
    turns = sum(1 + len(prompt.more_turns) for prompt in prompts)
    done = 0
    with tqdm(total=turns, unit="turn", desc="decoding", dynamic_ncols=True) as bar:
        for prompt in prompts:
            messages = list(prompt.messages)
            for turn, text in enumerate([None, *prompt.more_turns], start=1):
                if text is not None:
                    messages.append({"role": "user", "content": text})
                ids = torch.tensor(prompt_ids(target.tokenizer, messages))
                if len(ids) > limit:
                    too_long.append(prompt.id if turn == 1 else f"{prompt.id} turn {turn}")
                    bar.update(2 + len(prompt.more_turns) - turn)
                    break
                if not done:
                    # Before the clock counts: first calls allocate and compile.
                    check_output_head(target, ids[None])
                    decode(ids, max_new_tokens=min(4, config.max_new_tokens), plain_first=True)
                # Who goes first alternates, as the machine may slow down or speed up.
                plain, drafted = decode(
                    ids, max_new_tokens=config.max_new_tokens, plain_first=done % 2 == 0
                )
                done += 1
                counts += ChainCounts.of_rounds(drafted.accepted, num_steps=config.num_steps)
                bar.set_postfix_str(f"τ {counts.length:.2f}", refresh=False)
                bar.update()
                yield Answer(
                    prompt=prompt.id,
                    turn=turn,
                    category=prompt.category,
                    prompt_tokens=len(ids),
                    plain=plain,
                    drafted=drafted,
                    difference=explain_difference(target, ids, plain.tokens, drafted.tokens),
                )
                answer = target.tokenizer.decode(plain.tokens, skip_special_tokens=True)
                messages.append({"role": "assistant", "content": answer})


def _both_ways(
    target: Target,
    head: DraftHead,
    ids: Tensor,
    *,
    num_steps: int,
    max_new_tokens: int,
    stop_ids: Collection[int],
    plain_first: bool,
) -> tuple[Generation, Generation]:
    """The plain and the drafted answer to one prompt, in the order that is asked for."""

    def plainly() -> Generation:
        return plain_generate(target, ids, max_new_tokens=max_new_tokens, stop_ids=stop_ids)

    plain = plainly() if plain_first else None
    drafted = speculative_generate(
        target,
        head,
        ids,
        drafting=Drafting.chain(num_steps),
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
    )
    return plain or plainly(), drafted


@torch.inference_mode()
def explain_difference(
    target: Target, ids: Tensor, plain: list[int], drafted: list[int]
) -> dict[str, Any] | None:
    """Where two answers to one prompt first differ, and whether the target was undecided there.

    The two decoders run the target over other numbers of rows at once, which rounds differently.
    How differently is measured at this very place: the logits as plain decoding had them, token
    by token, against those from one forward over the same tokens.
    """
    if plain == drafted:
        return None
    common = next(
        (i for i, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b),
        min(len(plain), len(drafted)),
    )
    ours, theirs = drafted[common:][:1], plain[common:][:1]
    found = {"position": common, "with_head": ours, "without_head": theirs}
    if not (ours and theirs):  # one answer is the beginning of the other: no choice to look at
        return found | {"logit_gap": None, "rounding": None, "near_tie": False}
    ids = ids.to(target.device)
    answer = ids.new_tensor(plain[:common])
    stepwise = TargetStream(target)
    last = stepwise.append(ids)[-1]
    for token in answer.split(1):
        last = stepwise.append(token)[-1]
    logits = target.head.logits(last)  # [V]
    at_once = target.head.logits(TargetStream(target).append(torch.cat([ids, answer]))[-1])
    gap = float((logits[theirs] - logits[ours]).abs())
    rounding = float((at_once - logits).abs().max())
    # Either logit may be off by the rounding.
    return found | {"logit_gap": gap, "rounding": rounding, "near_tie": gap <= 2 * rounding}


def _report(
    config: EvaluateConfig, target: Target, record: dict[str, Any], answers: list[Answer]
) -> dict[str, Any]:
    by_category: dict[str, list[Answer]] = {}
    for answer in answers:
        by_category.setdefault(answer.category or "no category", []).append(answer)
    return {
        "format_version": FORMAT_VERSION,
        "settings": asdict(config)
        | {"temperature": 0, "tree": "chain", "batch_size": 1, "dtype": dtype_name(target.dtype)},
        "overall": _summary(answers, config.num_steps),
        "categories": {
            name: _summary(members, config.num_steps) for name, members in by_category.items()
        },
        "outputs_equal": sum(answer.difference is None for answer in answers),
        "differences": [
            {"prompt": answer.prompt, "turn": answer.turn} | answer.difference
            for answer in answers
            if answer.difference
        ],
        "machine": _machine(target),
        "fingerprint": target.fingerprint,
        "head": record,
        "answers": [asdict(answer) for answer in answers],
    }


def _summary(answers: list[Answer], num_steps: int) -> dict[str, Any]:
    """Acceptance and speed over some answers; seconds are sums."""
    accepted = [count for answer in answers for count in answer.drafted.accepted]
    tokens = {
        "with_head": sum(len(answer.drafted.tokens) for answer in answers),
        "without_head": sum(len(answer.plain.tokens) for answer in answers),
    }
    seconds = {
        "with_head": _seconds([answer.drafted for answer in answers]),
        "without_head": _seconds([answer.plain for answer in answers]),
    }
    speed = {way: _rate(tokens[way], seconds[way]["total"]) for way in tokens}
    # The first token of an answer comes from the prefill, which no head makes faster.
    later = {
        way: _rate(tokens[way] - len(answers), seconds[way]["total"] - seconds[way]["prefill"])
        for way in tokens
    }
    counts = ChainCounts.of_rounds(accepted, num_steps=num_steps)
    return {
        "answers": len(answers),
        "tokens": tokens["with_head"],
        "rounds": len(accepted),
        **counts.to_json(),
        "acceptance_length_without_bonus": counts.length - 1,
        "tokens_per_second": speed,
        "speedup": _rate(speed["with_head"], speed["without_head"]),
        "tokens_per_second_after_prefill": later,
        "speedup_after_prefill": _rate(later["with_head"], later["without_head"]),
        "seconds": seconds,
    }


def _rate(amount: float, per: float) -> float:
    return amount / per if amount else 0.0  # nothing after the prefill: no time either


def _seconds(generations: list[Generation]) -> dict[str, float]:
    names = ("total", "prefill", "draft", "verify", "other")
    return {name: sum(getattr(g.seconds, name) for g in generations) for name in names}


def _prompt_limit(config: EvaluateConfig, target: Target) -> int:
    positions = target.model.config.get_text_config().max_position_embeddings
    return min(config.max_prompt_tokens, positions - config.max_new_tokens - config.num_steps)


def _check_sizes(head: DraftHead, target: Target, config: EvaluateConfig) -> None:
    vocab_size, hidden_size = target.head.weight.shape
    found = (head.config.hidden_size, head.config.vocab_size)
    if found != (hidden_size, vocab_size):
        raise ValueError(
            f"The head in {config.head} has hidden_size {found[0]} and vocab_size {found[1]}, "
            f"{config.target.path} has {hidden_size} and {vocab_size}. Evaluate it with the "
            "target it was trained for (target=...)."
        )


def _machine(target: Target) -> dict[str, Any]:
    gpu = target.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(target.device) if gpu else str(target.device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
