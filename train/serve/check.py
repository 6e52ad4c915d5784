"""Whether a serving engine does with an exported head what we do: same tokens, same acceptance."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from data.config import TargetConfig
from data.files import write_json
from data.prompts import prompt_ids, read_prompts
from data.target import (
    Target,
    fingerprint,
    fingerprint_differences,
    load_config,
    load_target,
    load_tokenizer,
)
from train.acceptance import ChainCounts
from train.config import CheckConfig
from train.decode import Drafting, as_served, speculative_generate, stop_ids_of
from train.head import DraftHead
from train.serve.check_report import NEAR_TIE, TOLERANCE, Answers, first_difference, show
from train.serve.engine_config import dtype_name
from train.serve.engine_vllm import Request, Result, require_vllm, run_vllm
from train.serve.export import load_exported

log = logging.getLogger(__name__)

FORMAT_VERSION = 1


def check(config: CheckConfig) -> dict[str, Any]:
    """Decode the prompts in the engine, with and without the head, and with our own decoder.

    Writes OUT/report.json and returns it; `passed` says whether outputs are equal token for token
    and the acceptance lengths differ by at most 3 %. Raises ValueError for a folder or a target
    that do not belong together, RuntimeError if the engine is missing or dies.
    """
    _check_engine(config)
    assert config.head is not None
    path = Path(config.head)
    out = Path(config.out) if config.out else path / "check"
    head, record = load_exported(path)
    _check_record(record, config)
    names, prompts = _read_prompts(config)
    max_model_len = _max_model_len(config, prompts)

    log.info("ours        decoding %d prompts", len(prompts))
    ours, dtype, stop_ids = _decode(config, head, prompts)
    torch.cuda.empty_cache()  # the target is gone, and the engine wants the memory
    engine = {}
    for name, folder in (("without_head", None), ("with_head", str(path))):
        request = Request(
            model=config.target.path,
            revision=config.target.revision,
            trust_remote_code=config.target.trust_remote_code,
            dtype=dtype_name(dtype),
            head=folder,
            num_steps=config.num_steps,
            prompts=prompts,
            max_new_tokens=config.max_new_tokens,
            stop_ids=stop_ids,
            max_model_len=max_model_len,
        )
        engine[name] = run_vllm(request, out, name=name)

    differences = _differences(engine, ours, names)
    if differences:
        _explain(differences, prompts, names, config.target, dtype_name(dtype))
    report = _report(config, record, engine, ours, differences, dtype_name(dtype), names)
    write_json(out / "report.json", report)
    show(report)
    log.info("report      %s", out / "report.json")
    return report


def _check_engine(config: CheckConfig) -> None:
    if config.engine != "vllm":
        raise ValueError(f"engine is {config.engine!r}, but only vllm can be checked.")
    require_vllm()


def _check_record(record: dict, config: CheckConfig) -> None:
    if record["engine"] != config.engine:
        raise ValueError(
            f"{config.head} was exported for {record['engine']}. Export the checkpoint for "
            f"{config.engine}: python -m scripts.export_head checkpoint=... engine={config.engine}"
        )
    differences = fingerprint_differences(fingerprint(config.target), record["fingerprint"])
    if differences:
        raise ValueError(
            f"{config.target.path} is not the target that {config.head} was trained for: "
            + "; ".join(differences)
            + ". Say where that target is (target=...)."
        )


def _read_prompts(config: CheckConfig) -> tuple[list[str], list[list[int]]]:
    """Ids and tokens of the prompts that are short enough."""
    tokenizer = load_tokenizer(config.target)
    read = read_prompts(Path(config.prompts), limit=config.limit)
    tokens = {prompt.id: prompt_ids(tokenizer, prompt.messages) for prompt in read}
    short = {name: ids for name, ids in tokens.items() if len(ids) <= config.max_prompt_tokens}
    log.info(
        "prompts     %d of %s, %d left out as longer than %d tokens",
        len(short),
        config.prompts,
        len(tokens) - len(short),
        config.max_prompt_tokens,
    )
    if not short:
        raise ValueError(
            f"No prompt of {config.prompts} has at most {config.max_prompt_tokens} tokens "
            "(max_prompt_tokens)."
        )
    return list(short), list(short.values())


def _max_model_len(config: CheckConfig, prompts: list[list[int]]) -> int:
    # Near its limit an engine drafts fewer tokens, so leave room for two whole rounds.
    room = 2 * (config.num_steps + 1)
    length = max(map(len, prompts)) + config.max_new_tokens + room
    limit = load_config(config.target).get_text_config().max_position_embeddings
    if length > limit:
        raise ValueError(
            f"The longest prompt with {config.max_new_tokens} new tokens needs {length} positions, "
            f"but {config.target.path} has {limit}. Lower max_prompt_tokens or max_new_tokens."
        )
    return length


def _decode(
    config: CheckConfig, head: DraftHead, prompts: list[list[int]]
) -> tuple[Answers, torch.dtype, list[int]]:
    """Our own answers, the dtype they were computed in, and the stop tokens."""
    target = load_target(config.target)
    stop_ids = sorted(stop_ids_of(target))
    served = as_served(head, device=target.device, dtype=target.dtype)
    answers = [
        speculative_generate(
            target,
            served,
            torch.tensor(ids),
            drafting=Drafting.chain(config.num_steps),
            max_new_tokens=config.max_new_tokens,
            stop_ids=stop_ids,
        )
        for ids in tqdm(prompts, desc="ours", unit="prompt")
    ]
    rounds = [count for answer in answers for count in answer.accepted]
    acceptance = ChainCounts.of_rounds(rounds, num_steps=config.num_steps)
    seconds = sum(answer.seconds.total for answer in answers)
    return Answers([a.tokens for a in answers], seconds, acceptance), target.dtype, stop_ids


def _differences(
    engine: dict[str, Result], ours: Answers, names: list[str]
) -> list[dict[str, Any]]:
    """The first difference of every prompt, engine with the head against the two others."""
    found = []
    others = {"engine without the head": engine["without_head"].tokens, "ours": ours.tokens}
    for other, answers in others.items():
        for name, a, b in zip(names, engine["with_head"].tokens, answers, strict=True):
            position = first_difference(a, b)
            if position is not None:
                found.append(
                    {
                        "prompt": name,
                        "compared_with": other,
                        "position": position,
                        "engine_with_head": a[position] if position < len(a) else None,
                        "other": b[position] if position < len(b) else None,
                        "common": a[:position],
                    }
                )
    return found


def _explain(
    differences: list[dict[str, Any]],
    prompts: list[list[int]],
    names: list[str],
    config: TargetConfig,
    dtype: str,
) -> None:
    """Add what the target itself thinks of the two tokens: a near-tie is no fault of the head."""
    target = load_target(config)
    by_name = dict(zip(names, prompts, strict=True))
    for difference in differences:
        prefix = by_name[difference["prompt"]] + difference.pop("common")
        first, second = difference["engine_with_head"], difference["other"]
        if first is None or second is None:
            continue  # one answer ended early: nothing to compare
        gap = _logit_gap(target, prefix, first, second)
        difference |= {"logit_gap": gap, "near_tie": gap <= NEAR_TIE[dtype]}


def _logit_gap(target: Target, prefix: list[int], first: int, second: int) -> float:
    input_ids = torch.tensor([prefix], device=target.device)
    logits = target.head.logits(target.features(input_ids)[0, -1])  # [V]
    return float((logits[first] - logits[second]).abs())


def _report(
    config: CheckConfig,
    record: dict,
    engine: dict[str, Result],
    ours: Answers,
    differences: list[dict[str, Any]],
    dtype: str,
    names: list[str],
) -> dict[str, Any]:
    with_head = engine["with_head"]
    theirs = ChainCounts.of_totals(with_head.drafts, with_head.accepted_per_step)
    assert ours.acceptance is not None
    relative = theirs.length / ours.acceptance.length - 1.0
    close = abs(relative) <= TOLERANCE
    return {
        "format_version": FORMAT_VERSION,
        "passed": close and not differences,
        "outputs_equal": not differences,
        "acceptance_close": close,
        "relative_difference": relative,
        "tolerance": TOLERANCE,
        "counters_equal": theirs.to_json() == ours.acceptance.to_json(),
        "engine": {
            "name": config.engine,
            "version": with_head.version,
            **theirs.to_json(),
            "seconds": with_head.seconds,
            "seconds_without_head": engine["without_head"].seconds,
        },
        "ours": {**ours.acceptance.to_json(), "seconds": ours.seconds},
        "differences": differences,
        "near_tie_below": NEAR_TIE[dtype],
        "prompts": names,
        "num_tokens": sum(map(len, ours.tokens)),
        "settings": asdict(config),
        "dtype": dtype,
        "step": record["step"],
        "fingerprint": record["fingerprint"],
    }
