"""Measure an exported head: acceptance and speed, against plain decoding in the same run."""

import hashlib
import logging
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from data.chats.prompt_sets import Prompt, prompt_files, read_prompt_sets
from data.files import sha256
from data.lock import locked
from data.targets.model import Target, fingerprint_differences, load_target
from train.config import EvaluateConfig
from train.decode import Drafting, Sampling, as_served, stop_ids_of
from train.head import DraftHead
from train.measure.answer_log import AnswerLog
from train.measure.answers import PromptSets, Setup, measure_answers
from train.measure.baselines import load_baselines
from train.measure.choose_tree import DEPTH, TreeChoice, choose_drafting
from train.measure.confidence import calibration, tried_nodes
from train.measure.costs import Costs, measure_costs
from train.measure.example_trees import example_trees
from train.measure.report import write_report
from train.measure.summary import Answer, summaries
from train.serve.engine_config import dtype_name
from train.serve.import_head import load_head_folder

log = logging.getLogger(__name__)

FORMAT_VERSION = 2
# Where an answer is kept and which of them are asked for does not change the answer.
NOT_MEASURED = ("out", "restart", "limit", "prompts", "head")


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Answer the prompts with the head and without, alternately, and compare.

    Writes OUT/answers.jsonl as it goes, from which a second start goes on, then OUT/report.json,
    report.txt and report.html, and returns the report. A target that is not the head's own is a
    warning that names each differing field. Raises ValueError for a target of another size, if no
    prompt is short enough, and if OUT holds answers that were measured otherwise; RuntimeError if
    another process measures into OUT.
    """
    out = _out(config)
    sets = read_prompt_sets(config.prompts, limit=config.limit)
    head, record = load_head_folder(config.head, config.target)
    target = load_target(config.target)
    differences = fingerprint_differences(target.fingerprint, record["fingerprint"])
    for line in differences:
        log.warning("target      is not the one the head was trained for: %s", line)
    head = as_served(head, device=target.device, dtype=target.dtype)
    log.info(
        "target      %s in %s on %s", config.target.path, dtype_name(target.dtype), target.device
    )
    counts = ", ".join(f"{len(prompts)} of {name}" for name, prompts in sets.items())
    log.info("prompts     %s", counts)
    busy = f"Another process measures into {out}. Wait for it, or choose another folder (out=...)."
    with locked(out / ".lock", busy=busy):
        answers = AnswerLog(out, _header(config, target, head), restart=config.restart)
        report = _measured(config, target, head, sets, answers)
        report |= {"out": str(out), "fingerprint_differences": differences, "head": record}
        write_report(report, out)
    return report


def _measured(
    config: EvaluateConfig, target: Target, head: DraftHead, sets: PromptSets, answers: AnswerLog
) -> dict[str, Any]:
    if answers.answers:
        log.info("going on    %d answers are in %s already", len(answers.answers), answers.path)
    costs = _costs(config, target, head, answers)
    limit = _prompt_limit(config, target)
    drafting = choose_drafting(config, target, head, costs, _first(sets), answers, limit=limit)
    log.info("drafting    %s", described(drafting))
    setup = Setup(
        target=target,
        head=head,
        drafting=drafting,
        sampling=Sampling(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            seed=config.seed,
        ),
        stop_ids=stop_ids_of(target),
        max_new_tokens=config.max_new_tokens,
        max_prompt_tokens=limit,
        batch_size=config.batch_size,
        baselines=load_baselines(config, target),
    )
    too_long = measure_answers(setup, sets, answers)
    asked = {(name, prompt.id) for name, prompts in sets.items() for prompt in prompts}
    found = [one for one in answers.answers if (one["set"], one["prompt"]) in asked]
    if not found:
        raise ValueError(
            f"None of the {len(asked)} prompts of {config.prompts} has at most {limit} tokens "
            "(max_prompt_tokens, and the target's positions less max_new_tokens)."
        )
    choice = TreeChoice.measured(target, head, found, costs, batch_size=config.batch_size)
    return _report(config, target, drafting, found, too_long, costs, choice)


def _report(
    config: EvaluateConfig,
    target: Target,
    drafting: Drafting,
    answers: Sequence[Answer],
    too_long: list[str],
    costs: Costs,
    choice: TreeChoice | None,
) -> dict[str, Any]:
    rounds = [one for answer in answers for one in answer["drafted"]["rounds"]]
    summed = summaries(answers, num_steps=drafting.num_steps)
    return {
        "format_version": FORMAT_VERSION,
        "settings": asdict(config)
        | {"dtype": dtype_name(target.dtype), "drafting": asdict(drafting)},
        **summed,
        "outputs_equal": sum(answer["difference"] is None for answer in answers),
        "differences": [
            {"set": answer["set"], "prompt": answer["prompt"], "turn": answer["turn"]}
            | answer["difference"]
            for answer in answers
            if answer["difference"]
        ],
        "too_long": too_long,
        "calibration": calibration(tried_nodes(rounds)),
        "trees": example_trees(answers, target.tokenizer),
        "costs": costs.to_json(),
        **(
            choice.to_json(drafting, length=summed["overall"]["acceptance_length"])
            if choice
            else {}
        ),
        "machine": machine(target),
        "fingerprint": target.fingerprint,
    }


def described(drafting: Drafting) -> str:
    """As tables have it: a dynamic tree of 8 nodes, depth 5, width 4."""
    if drafting.tree == "chain":
        return f"a chain of {drafting.num_steps}"
    return (
        f"a {drafting.tree} tree of {drafting.num_draft_tokens} nodes with the root, depth "
        f"{drafting.num_steps}, width {drafting.topk}"
    )


def machine(target: Target) -> dict[str, Any]:
    """What speeds depend on, and what numbers may."""
    gpu = target.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(target.device) if gpu else str(target.device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def _header(config: EvaluateConfig, target: Target, head: DraftHead) -> dict[str, Any]:
    """What is measured and how: answers that were measured otherwise are not gone on with."""
    settings = {k: v for k, v in asdict(config).items() if k not in NOT_MEASURED}
    files = prompt_files(config.prompts)
    return {
        "settings": settings | {"dtype": dtype_name(target.dtype)},
        "head": _digest(head),
        "target": {k: v for k, v in target.fingerprint.items() if k not in ("path", "revision")},
        "prompts": {name: sha256(file) for name, file in files.items()},
        "machine": machine(target),
    }


def _costs(config: EvaluateConfig, target: Target, head: DraftHead, answers: AnswerLog) -> Costs:
    """Of forwards in the middle of an answer of usual length."""
    context = min(config.max_prompt_tokens, 128) + config.max_new_tokens // 2
    measured = answers.once("costs", lambda: measure_costs(target, head, context=context).to_json())
    return Costs.from_json(measured)


def _first(sets: PromptSets) -> list[Prompt]:
    """The prompts of all sets, taken in turns."""
    longest = max(map(len, sets.values()))
    return [prompts[i] for i in range(longest) for prompts in sets.values() if i < len(prompts)]


def _prompt_limit(config: EvaluateConfig, target: Target) -> int:
    positions = target.model.config.get_text_config().max_position_embeddings
    room = max(config.num_steps, DEPTH if config.tree == "auto" else 0)
    return min(config.max_prompt_tokens, positions - config.max_new_tokens - room)


def _out(config: EvaluateConfig) -> Path:
    if config.out:
        return Path(config.out)
    if not Path(config.head).is_dir():
        raise ValueError(f"{config.head} is no folder here: say where the report goes (out=...).")
    return Path(config.head) / "evaluation"


def _digest(head: DraftHead) -> str:
    """Tells heads apart, however their files are called."""
    digest = hashlib.sha256()
    for name, tensor in sorted(head.state_dict().items()):
        digest.update(name.encode() + tensor.detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()[:16]
