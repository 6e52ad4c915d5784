"""What a check of an exported head found: counts, differences, and what to look at."""

import logging
from dataclasses import dataclass
from typing import Any

from train.acceptance import ChainCounts

log = logging.getLogger(__name__)

TOLERANCE = 0.03  # relative difference of the acceptance lengths
# Largest gap between two logits that different but correct kernels may put in either order.
NEAR_TIE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.25}


@dataclass(frozen=True)
class Answers:
    """One decoder's answers to all prompts."""

    tokens: list[list[int]]
    seconds: float
    acceptance: ChainCounts | None = None  # counted before answers are cut at their end


def first_difference(a: list[int], b: list[int]) -> int | None:
    """The first position at which two answers differ, or at which only one has ended."""
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


def show(report: dict[str, Any]) -> None:
    steps = len(report["ours"]["alpha"])
    log.info("")
    log.info("%-8s %8s %s", "", "τ", " ".join(f"{f'α_{n}':>7}" for n in range(1, steps + 1)))
    for name, row in (("vLLM", report["engine"]), ("ours", report["ours"])):
        rates = " ".join(f"{rate:7.4f}" for rate in row["alpha"])
        counts = f"{row['accepted']} accepted in {row['tried'][0]} rounds"
        log.info("%-8s %8.4f %s   %s", name, row["acceptance_length"], rates, counts)
    log.info(
        "τ differs by %+.2f %% (at most %.0f %%); bonus token included, greedy chain of %d, %s",
        100 * report["relative_difference"],
        100 * report["tolerance"],
        steps,
        report["dtype"],
    )
    if report["outputs_equal"]:
        log.info(
            "outputs     %d tokens of %d prompts are equal: engine with the head, without, ours",
            report["num_tokens"],
            len(report["prompts"]),
        )
    for difference in report["differences"]:
        log.warning(
            "differs     prompt %(prompt)s, position %(position)d, against %(compared_with)s: "
            "%(engine_with_head)s there, %(other)s here%(tie)s",
            difference | {"tie": _tie(difference)},
        )
    for line in advice(report):
        log.warning("look at     %s", line)
    log.info("%s", "passed" if report["passed"] else "FAILED")


def _tie(difference: dict[str, Any]) -> str:
    if "logit_gap" not in difference:
        return ""
    kind = "a near-tie" if difference["near_tie"] else "no near-tie"
    return f"; logit gap {difference['logit_gap']:.2g}, {kind}"


def advice(report: dict[str, Any]) -> list[str]:
    """What to look at after a failed check, most likely cause first."""
    lines = []
    if not report["outputs_equal"]:
        if all(difference.get("near_tie") for difference in report["differences"]):
            lines.append(
                "every difference is a near-tie: other kernels round differently. Decode in "
                "float32 (target.dtype=float32) to see whether it goes away"
            )
        else:
            lines.append(
                "outputs must not depend on the head: a difference that is no near-tie is a fault "
                "of the engine, of the target's files, or of different token ids"
            )
    if not report["acceptance_close"]:
        if report["engine"]["acceptance_length"] < report["ours"]["acceptance_length"]:
            lines.append(
                "the engine accepts less, as if the head it built were another: export again with "
                "this version, and look in with_head.log for tensors it skipped or warned about"
            )
        if len(report["prompts"]) < 8 or report["ours"]["tried"][0] < 200:
            lines.append(
                "few rounds were counted: after one differing token the rest of an answer differs "
                "too, so use more prompts (limit=, max_new_tokens=)"
            )
        lines.append(
            "engine versions differ in how they feed heads: compare with the version in "
            "constraints.txt"
        )
    return lines
