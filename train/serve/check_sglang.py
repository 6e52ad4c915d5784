"""Whether SGLang loads an exported head as it is, and drafts, accepts and answers with it as we do.

The first needs seconds. The second, with prompts, runs SGLang's own scheduler over the stand-ins
of `train/serve/sglang_cpu`, whose docstring says what is not real: slow, and for few prompts.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from data.files import read_json, write_json
from data.targets.model import Target, load_target
from train.config import CheckConfig
from train.decode import Drafting, as_served, plain_generate, speculative_generate, stop_ids_of
from train.decode.generate import Generation
from train.head import DraftHead
from train.serve.check_differences import differences, explain
from train.serve.check_prompts import PromptSet, read_sets, steps_of
from train.serve.check_report import compare_set
from train.serve.engine_config import dtype_name
from train.serve.engine_sglang import check_with_sglang, decode_with_sglang, describe
from train.serve.engine_vllm import Counters
from train.serve.folder import RECORD, head_folder, read_folder
from train.serve.import_head import load_head_folder
from train.serve.inspect_head import fingerprint_lines
from train.serve.target_facts import target_facts

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
Paths = set[tuple[int, ...]]


def check_sglang(config: CheckConfig) -> dict[str, Any]:
    """Load the head in SGLang and, with prompts, decode them there, with our decoder and plainly.

    Writes OUT/report.json and returns it. `passed`: every parameter of SGLang's module is the
    file's, bit for bit; outputs are equal token for token; acceptance lies in the confidence
    interval of ours. Raises ValueError for a folder that is no head of this target, RuntimeError if
    SGLang is missing or dies.
    """
    assert config.head is not None
    path = head_folder(config.head)
    out = Path(config.out) if config.out else path / "check"
    record = read_folder(path).record
    warnings = fingerprint_lines(record, target_facts(config.target)) if record else []
    for line in warnings:
        log.warning("warning     the head was trained for another target: %s", line)
    report: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "settings": asdict(config),
        "fingerprint_differences": warnings,
        "loaded": check_with_sglang(path, config.target, out=out, python=config.sglang_python),
        "checks": [],
        "differences": [],
    }
    log.info("%s", describe(report["loaded"]))
    if config.prompts and report["loaded"]["passed"]:
        report |= _decode(config, path, out)
    report["passed"] = (
        report["loaded"]["passed"]
        and all(check["close"] for check in report["checks"])
        and not report["differences"]
    )
    write_json(out / "report.json", report)
    log.info("report      %s", out / "report.json")
    log.info("%s", "passed" if report["passed"] else "FAILED")
    return report


def is_for_sglang(config: CheckConfig) -> bool:
    """Whether `config.engine`, or else the export itself, says SGLang."""
    if config.engine is None and config.head:
        file = head_folder(config.head) / RECORD
        made_by = "python -m scripts.export_head"
        return file.is_file() and read_json(file, made_by=made_by).get("engine") == "sglang"
    return config.engine == "sglang"


def drafting_of(config: CheckConfig, num_steps: int) -> Drafting:
    """A chain, or the dynamic tree of SGLang, in which a beam rank keeps its keys."""
    if config.topk == 1:
        return Drafting.chain(num_steps)
    return Drafting.dynamic(
        num_steps=num_steps,
        topk=config.topk,
        num_draft_tokens=config.num_draft_tokens or num_steps + 1,
        ancestors="rank",
    )


def _decode(config: CheckConfig, path: Path, out: Path) -> dict[str, Any]:
    """Answers, trees and acceptance, ours and SGLang's."""
    head, _ = load_head_folder(path, config.target)
    target = load_target(config.target)
    head = as_served(head, device=target.device, dtype=target.dtype)
    sets = read_sets(config)
    checks, found = [], []
    for one in sets:
        prompts = tqdm(one.tokens, desc=f"plain decoding, {one.name}", unit="prompt")
        plain = [_plain(target, ids, config) for ids in prompts]
        for num_steps in steps_of(config):
            drafting = drafting_of(config, num_steps)
            ours = [
                _ours(target, head, ids, drafting, config)
                for ids in tqdm(one.tokens, desc=f"our decoder, {one.name}", unit="prompt")
            ]
            log.info("SGLang      decoding %d prompts of %s", len(one.tokens), one.name)
            theirs = decode_with_sglang(
                path,
                config.target,
                one.tokens,
                drafting=drafting,
                max_new_tokens=config.max_new_tokens,
                stop_ids=stop_ids_of(target),
                out=out,
                python=config.sglang_python,
            )
            answers = theirs["answers"]
            tokens = [answer["tokens"] for answer in answers]
            for name, other in (("plain decoding", plain), ("ours", [o.tokens for o in ours])):
                found += differences(one, tokens, other, compared_with=name, num_steps=num_steps)
            checks.append(_compared(one, drafting, ours, theirs))
            _show(checks[-1], drafting)
    dtype = dtype_name(target.dtype)
    if found:
        del target
        explain(found, sets, config.target)
    _show_outputs(found)
    return {"checks": checks, "differences": found, "dtype": dtype}


def _plain(target: Target, ids: list[int], config: CheckConfig) -> list[int]:
    return plain_generate(
        target,
        torch.tensor(ids),
        max_new_tokens=config.max_new_tokens,
        stop_ids=stop_ids_of(target),
    ).tokens


def _ours(
    target: Target, head: DraftHead, ids: list[int], drafting: Drafting, config: CheckConfig
) -> Generation:
    return speculative_generate(
        target,
        head,
        torch.tensor(ids),
        drafting=drafting,
        max_new_tokens=config.max_new_tokens,
        stop_ids=stop_ids_of(target),
        record=True,
    )


def _compared(
    one: PromptSet, drafting: Drafting, ours: list[Generation], theirs: dict[str, Any]
) -> dict[str, Any]:
    accepted = [count for answer in theirs["answers"] for count in answer["accepted"]]
    steps = range(1, drafting.num_steps + 1)
    compared = compare_set(
        name=one.name,
        num_steps=drafting.num_steps,
        prompts=[prompt.id for prompt in one.prompts],
        ours=[answer.accepted for answer in ours],
        counters=Counters(
            drafts=len(accepted),
            draft_tokens=len(accepted) * (drafting.num_draft_tokens - 1),
            accepted_tokens=sum(accepted),
            accepted_per_step=[sum(count >= n for count in accepted) for n in steps],
        ),
        seconds=theirs["seconds"],
        seconds_without_head=0.0,
    )
    trees = list(_trees(ours, theirs["answers"]))
    return compared | {"rounds": len(trees), "equal_trees": sum(a == b for a, b in trees)}


def _trees(
    ours: Sequence[Generation], theirs: Sequence[dict[str, Any]]
) -> Iterator[tuple[Paths, Paths]]:
    """The trees of each round, ours and SGLang's."""
    for own, answer in zip(ours, theirs, strict=True):
        for mine, other in zip(own.rounds, answer["rounds"], strict=False):
            yield (
                tree_paths(mine.tokens, mine.parents),
                tree_paths(other["tokens"], other["parents"]),
            )


def tree_paths(tokens: Sequence[int], parents: Sequence[int]) -> Paths:
    """A tree as what can be read from its root to each of its nodes.

    A node without a parent that is not the root hangs in the air: SGLang can keep one where its
    value ties with its parent's, and never accepts it. It is left out, with what hangs on it.
    """
    found: dict[int, tuple[int, ...]] = {0: (tokens[0],)}
    for node in range(1, len(tokens)):
        if parents[node] in found:
            found[node] = (*found[parents[node]], tokens[node])
    return set(found.values())


def _show(check: dict[str, Any], drafting: Drafting) -> None:
    shape = f"steps {drafting.num_steps}, topk {drafting.topk}, {drafting.num_draft_tokens} tokens"
    log.info("\n%s, %d prompts, greedy, %s", check["set"], check["prompts"], shape)
    for name in ("engine", "ours"):
        row = check[name]
        title = "SGLang" if name == "engine" else name
        rates = " ".join(f"{rate:.4f}" for rate in row["alpha"])
        log.info("%-8s τ %.4f   α %s", title, row["acceptance_length"], rates)
    verdict = "the same to the last draft token"
    if not check["counters_equal"]:
        verdict = "within our interval" if check["close"] else "OUTSIDE our interval"
    log.info("%-8s %s; %d of %d trees equal", "", verdict, check["equal_trees"], check["rounds"])


def _show_outputs(found: list[dict[str, Any]]) -> None:
    if not found:
        log.info("\noutputs     all equal: SGLang with the head, our decoder, plain decoding")
    for difference in found[:10]:
        log.warning(
            "differs     %(set)s prompt %(prompt)s, position %(position)d, against "
            "%(compared_with)s: %(engine_with_head)s there, %(other)s here",
            difference,
        )
