"""Whether a serving engine does with an exported head what we do: same tokens, same acceptance."""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from data.files import write_json
from data.targets.model import load_target
from train.config import CheckConfig
from train.decode import Drafting, as_served, speculative_generate, stop_ids_of
from train.head import DraftHead
from train.serve.check_differences import differences, explain
from train.serve.check_parity import parity
from train.serve.check_prompts import PromptSet, max_model_len, read_sets, steps_of
from train.serve.check_report import compare_set, passed, show
from train.serve.engine_config import dtype_name
from train.serve.engine_vllm import Request, require_vllm, run_vllm
from train.serve.folder import HeadFolder, head_folder, read_folder
from train.serve.import_head import load_head_folder, stored_in
from train.serve.inspect_head import fingerprint_lines, show_findings
from train.serve.rules import REFUSED
from train.serve.server_vllm import ask_server
from train.serve.target_facts import TargetFacts, sliding_window, target_facts
from train.serve.trial import readings, trial_hits
from train.serve.validate import Finding, effects, findings, verdict

log = logging.getLogger(__name__)

FORMAT_VERSION = 2
TRIED = 4  # prompts on which the head is read in other ways too
WITHOUT = "engine without head"


@dataclass(frozen=True, kw_only=True)
class Ours:
    """Our own answers: for each number of draft steps and each set."""

    tokens: dict[int, list[list[list[int]]]]
    accepted: dict[int, list[list[list[int]]]]  # of each round of each prompt
    seconds: dict[int, list[float]]
    dtype: torch.dtype
    stop_ids: list[int]
    found: list[Finding]  # what running the target says of the head
    embed_tokens: Tensor  # [V, H]


def check(config: CheckConfig) -> dict[str, Any]:
    """Decode the prompts in the engine, with and without the head, and with our own decoder.

    Writes OUT/report.json and returns it. `passed`: the folder is what the engine loads as it is
    meant, outputs are equal token for token, acceptance lies in the confidence interval of ours,
    the engine's own module computes our head's features, and the head accepts what it should. A
    target that is not the head's own is a warning that names each field. Raises ValueError for a
    folder that is no head of this target, RuntimeError if the engine is missing or dies.
    """
    require_vllm()
    assert config.head is not None
    path = head_folder(config.head)
    folder, facts = read_folder(path), target_facts(config.target)
    record = _record(folder, config)
    warnings = fingerprint_lines(record, facts) if record else []
    for line in warnings:
        log.warning("warning     the head was trained for another target: %s", line)
    out = Path(config.out) if config.out else path / "check"
    found = [one for one in findings(folder, facts) if one.engine == "vllm"]
    report: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "settings": asdict(config),
        "fingerprint": facts.fingerprint,
        "fingerprint_differences": warnings,
        "recorded": (record.get("acceptance") or None) if record else None,
    }
    if verdict(found, "vllm") == REFUSED:
        show_findings(found, "vllm")
        return _finish(report | {"findings": [vars(one) for one in found], "checks": []}, out)
    head, _ = load_head_folder(path, config.target)
    sets = read_sets(config)
    ours = _decode(config, folder, facts, head, sets)
    found += [one for one in ours.found if one.engine == "vllm"]
    show_findings(found, "vllm")
    report |= {"findings": [vars(one) for one in found], "dtype": dtype_name(ours.dtype)}
    report |= _compare(config, facts, sets, ours, head, out)
    return _finish(report, out)


def _finish(report: dict[str, Any], out: Path) -> dict[str, Any]:
    report["passed"] = passed(report)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "report.json", report)
    show(report)
    log.info("report      %s", out / "report.json")
    return report


def _record(folder: HeadFolder, config: CheckConfig) -> dict[str, Any] | None:
    record = folder.record
    if record and record["engine"] != "vllm":
        raise ValueError(
            f"{config.head} was exported for {record['engine']}. Export the checkpoint for vllm: "
            "python -m scripts.export_head checkpoint=... engine=vllm"
        )
    return record


def _decode(
    config: CheckConfig,
    folder: HeadFolder,
    facts: TargetFacts,
    head: DraftHead,
    sets: list[PromptSet],
) -> Ours:
    """Our own answers; the target is gone afterwards, as the engine wants the memory."""
    target = load_target(config.target)
    stop_ids = sorted(stop_ids_of(target))
    served = as_served(head, device=target.device, dtype=target.dtype)
    hits = []
    if config.run_target:
        few = sets[0].tokens[:TRIED]
        hits = trial_hits(readings(stored_in(folder), facts, target, few))
    tokens: dict[int, list[list[list[int]]]] = {}
    accepted: dict[int, list[list[list[int]]]] = {}
    seconds: dict[int, list[float]] = {}
    for steps in steps_of(config):
        answers = [
            [
                speculative_generate(
                    target,
                    served,
                    torch.tensor(ids),
                    drafting=Drafting.chain(steps),
                    max_new_tokens=config.max_new_tokens,
                    stop_ids=stop_ids,
                )
                for ids in tqdm(one.tokens, desc=f"ours, {one.name}, K={steps}", unit="prompt")
            ]
            for one in sets
        ]
        tokens[steps] = [[answer.tokens for answer in many] for many in answers]
        accepted[steps] = [[answer.accepted for answer in many] for many in answers]
        seconds[steps] = [sum(answer.seconds.total for answer in many) for many in answers]
    dtype, embeddings = target.dtype, target.head.embed_tokens.cpu()
    del target
    torch.cuda.empty_cache()
    return Ours(
        tokens=tokens,
        accepted=accepted,
        seconds=seconds,
        dtype=dtype,
        stop_ids=stop_ids,
        found=effects(hits),
        embed_tokens=embeddings,
    )


def _compare(
    config: CheckConfig,
    facts: TargetFacts,
    sets: list[PromptSet],
    ours: Ours,
    head: DraftHead,
    out: Path,
) -> dict[str, Any]:
    """Run the engine and hold everything against our own answers."""
    path = head_folder(str(config.head))
    request = Request(
        model=config.target.path,
        revision=config.target.revision,
        trust_remote_code=config.target.trust_remote_code,
        dtype=dtype_name(ours.dtype),
        head=None,
        num_steps=0,
        sets=[one.tokens for one in sets],
        max_new_tokens=config.max_new_tokens,
        stop_ids=ours.stop_ids,
        max_model_len=max_model_len(config, sets),
    )
    plain = run_vllm(request, out, name="without_head")
    checks: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    seen: dict[str, Any] | None = None
    for steps in steps_of(config):
        file = out / "parity.safetensors" if seen is None else None
        changes = {"head": str(path), "num_steps": steps, "parity": file and str(file)}
        engine = run_vllm(_with(request, changes), out, name=f"with_head_{steps}")
        if file is not None:
            seen = parity(
                file, head, ours.embed_tokens, ours.dtype, window=sliding_window(facts.config)
            )
        for i, one in enumerate(sets):
            checks.append(
                compare_set(
                    name=one.name,
                    num_steps=steps,
                    prompts=[prompt.id for prompt in one.prompts],
                    ours=ours.accepted[steps][i],
                    counters=engine.counters[i],
                    seconds=engine.seconds[i],
                    seconds_without_head=plain.seconds[i],
                )
            )
            for other, answers in (("ours", ours.tokens[steps][i]), (WITHOUT, plain.tokens[i])):
                found += differences(
                    one, engine.tokens[i], answers, compared_with=other, num_steps=steps
                )
    report: dict[str, Any] = {
        "engine": {"name": "vllm", "version": plain.version},
        "checks": checks,
        "parity": seen,
        "num_tokens": sum(len(t) for many in plain.tokens for t in many),
    }
    if config.server:
        last = steps_of(config)[-1]
        asked = _with(request, {"head": str(path), "num_steps": last})
        report["server"], more = ask_server(asked, sets, ours.tokens[last], out)
        found += more
    if found:
        explain(found, sets, config.target)
    return report | {"differences": found}


def _with(request: Request, changes: dict[str, Any]) -> Request:
    return Request(**{**asdict(request), **changes})
