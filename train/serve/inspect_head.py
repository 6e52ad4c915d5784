"""Look at any head's folder, say what each engine would make of it, and repair what can be."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from data.files import atomic_folder, sha256, write_json
from data.targets.model import fingerprint_differences, load_target
from train.config import CheckConfig
from train.serve.case import Hit
from train.serve.engine_config import ENGINE_NAMES, dtype_name
from train.serve.folder import RECORD, HeadFolder, head_folder, read_folder
from train.serve.import_head import stored_in
from train.serve.repair import Repaired, repair
from train.serve.rules import ENGINES, NOTE, OTHER, REFUSED
from train.serve.target_facts import TargetFacts, target_facts
from train.serve.trial import Reading, best_reading, readings, trial_hits
from train.serve.validate import Finding, effects, findings, verdict

log = logging.getLogger(__name__)

MARKS = {REFUSED: "✗", OTHER: "✗", NOTE: "·"}
SUMMARY = {
    REFUSED: "would be refused, or stops at its first forward",
    OTHER: "would load as a different network: served, but with little or nothing accepted",
    NOTE: "would load as it is meant",
}


def inspect_head(config: CheckConfig) -> dict[str, Any]:
    """Say what vLLM and SGLang would make of `config.path`; with `config.fix` repair it into OUT.

    Returns the findings and `passed`: whether the engine asked for (without one, any engine)
    serves the folder as it is, or as it was repaired. Raises FileNotFoundError and ValueError for
    what is no head at all.
    """
    assert config.path is not None
    folder = read_folder(head_folder(config.path))
    facts = target_facts(config.target)
    _describe(folder, facts, config.path)
    found = findings(folder, facts)
    measured = _try(folder, facts, config) if config.run_target else []
    found += effects(trial_hits(measured) if measured else [])
    for engine in ENGINES:
        show_findings(found, engine)
    engines = [config.engine] if config.engine else list(ENGINES)
    passed = any(verdict(found, engine) == NOTE for engine in engines)
    report: dict[str, Any] = {
        "path": str(folder.path),
        "findings": [vars(one) for one in found],
        "verdicts": {engine: verdict(found, engine) for engine in ENGINES},
        "readings": [vars(one) for one in measured],
        "passed": passed,
    }
    if config.fix:
        report["repaired"] = _fix(config, folder, facts, measured)
        report["passed"] = report["repaired"]["passed"]
    elif not passed:
        log.info("\nRepair it into a new folder: fix=true out=NEW engine=vllm (or sglang)")
    return report


def _describe(folder: HeadFolder, facts: TargetFacts, path: str) -> None:
    names = ", ".join(sorted({dtype_name(t.dtype) for t in folder.tensors.values()}))
    files = ", ".join(folder.files) or "no weights file"
    log.info("head        %s: %d tensors in %s, %s", path, len(folder.tensors), files, names)
    target = (facts.path, facts.model_type, dtype_name(facts.dtype))
    log.info("target      %s: %s, %s", *target)
    record = folder.record
    if record is None:
        log.info("origin      unknown: it was not exported by this project")
        return
    log.info("origin      exported for %s from step %s", record["engine"], record.get("step"))
    for line in fingerprint_lines(record, facts):
        log.warning("warning     it was trained for another target: %s", line)


def fingerprint_lines(record: dict[str, Any], facts: TargetFacts) -> list[str]:
    """One line for each field in which the target is not the one that the head was trained for."""
    return fingerprint_differences(facts.fingerprint, record["fingerprint"])


def _try(folder: HeadFolder, facts: TargetFacts, config: CheckConfig) -> list[Reading]:
    """The readings of the head, if its tensors make one at all."""
    log.info("trying      the target answers four questions (run_target=false leaves this out)")
    try:
        measured = readings(stored_in(folder), facts, load_target(config.target))
    except ValueError as error:
        log.info("tried       not: %s", error)
        return []
    best = best_reading(measured)
    log.info("tried       as it is %s%s", measured[0], "" if best is measured[0] else f"; {best}")
    return measured


def show_findings(found: Sequence[Finding], engine: str) -> None:
    """The findings of one engine as a table, the worst first."""
    mine = [one for one in found if one.engine == engine]
    log.info("\n%-11s %s", ENGINE_NAMES[engine], SUMMARY[verdict(list(mine), engine)])
    order = list(MARKS)
    for one in sorted(mine, key=lambda one: order.index(one.verdict)):
        log.info("  %s %-20s %s: %s", MARKS[one.verdict], one.rule, one.subject, one.found)
        log.info("    %-20s %s", "", one.why)
        if one.verdict != NOTE and one.repair:
            log.info("    %-20s fix: %s", "", one.repair)


def _fix(
    config: CheckConfig, folder: HeadFolder, facts: TargetFacts, measured: list[Reading]
) -> dict[str, Any]:
    """Write the repaired folder, and say what was done and what was not."""
    engine, out = config.engine or "vllm", Path(config.out or "")
    if out.exists():
        raise ValueError(
            f"{out} exists. A repair goes into a new folder: choose another (out=...)."
        )
    best = best_reading(measured) if measured else None
    repaired = repair(folder, facts, engine=engine, best=best)
    left = [*repaired.left, *_unrepairable(measured, engine)]
    log.info("\nrepair      for %s, into %s", ENGINE_NAMES[engine], out)
    for line in repaired.done or ["nothing had to be done"]:
        log.info("  ✓ %s", line)
    for one in left:
        log.warning("  ✗ %-20s %s: %s. Cannot be repaired: %s", *_four(one))
    if not left:
        write_repaired(repaired, out, engine=engine)
        log.info("written     %s, which %s would load as it is meant", out, ENGINE_NAMES[engine])
    else:
        log.warning("written     nothing: what is left would make it another network")
    return {
        "engine": engine,
        "out": str(out),
        "done": repaired.done,
        "left": [vars(one) for one in left],
        "passed": not left,
    }


def _four(one: Finding) -> tuple[str, str, str, str]:
    return one.rule, one.subject, one.found, one.why


def _unrepairable(measured: list[Reading], engine: str) -> list[Finding]:
    hits: list[Hit] = (
        [hit for hit in trial_hits(measured) if hit.rule == "predicts-nothing"]
        if (measured)
        else []
    )
    return [one for one in effects(hits) if one.engine == engine]


def write_repaired(repaired: Repaired, out: Path, *, engine: str) -> None:
    """The folder as an export would have written it; its record goes along if it has one."""
    folder = repaired.folder
    with atomic_folder(out) as tmp:
        weights = tmp / "model.safetensors"
        save_file(folder.tensors, weights, metadata={"format": "pt"})
        write_json(tmp / "config.json", folder.keys)
        if folder.record is not None:
            known, digest = folder.record.get("weights_sha256"), sha256(weights)
            if known not in (None, digest):
                log.warning("warning     the tensors are not bit for bit those that were exported")
            changed = {"engine": engine, "weights_sha256": digest}
            write_json(tmp / RECORD, folder.record | changed)
