"""What a check of an exported head found: counts, differences, and what to look at."""

import logging
from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch

from train.acceptance import ChainCounts, length_interval
from train.serve.engine_vllm import Counters
from train.serve.rules import NOTE

log = logging.getLogger(__name__)

TOLERANCE = 0.03  # relative difference of acceptance lengths where there is no interval
Z = 2.58  # of a 99 % interval: many steps are looked at, and none should fail by chance
ALIVE = 0.1  # share of the recorded acceptance below which a head accepts nothing


def compare_set(
    *,
    name: str,
    num_steps: int,
    prompts: Sequence[str],
    ours: list[list[int]],
    counters: Counters,
    seconds: float,
    seconds_without_head: float,
) -> dict[str, Any]:
    """Acceptance of one set at one number of draft steps, the engine's and ours.

    ours: accepted draft tokens of each round of each prompt

    `close`: the engine's τ lies in our 95 % interval over prompts (within 3 % where there is
    one prompt only), and each α_n in our 99 % interval.
    """
    each = [ChainCounts.of_rounds(rounds, num_steps=num_steps) for rounds in ours]
    mine = ChainCounts.of_rounds([n for rounds in ours for n in rounds], num_steps=num_steps)
    theirs = ChainCounts.of_totals(counters.drafts, counters.accepted_per_step)
    interval = length_interval(
        torch.stack([one.tried for one in each]),
        torch.stack([one.accepted for one in each]),
        prompts,
    )
    low, high = interval or (mine.length * (1 - TOLERANCE), mine.length * (1 + TOLERANCE))
    rates = [
        wilson(accepted, tried)
        for accepted, tried in zip(mine.accepted.tolist(), mine.tried.tolist(), strict=True)
    ]
    inside = [low <= rate <= high for rate, (low, high) in zip(theirs.rates, rates, strict=True)]
    equal = theirs.to_json() == mine.to_json()
    return {
        "set": name,
        "num_steps": num_steps,
        "prompts": len(prompts),
        "close": equal or (low <= theirs.length <= high and all(inside)),
        "counters_equal": equal,
        "relative_difference": theirs.length / mine.length - 1.0,
        "engine": theirs.to_json()
        | {"seconds": seconds, "seconds_without_head": seconds_without_head},
        "ours": mine.to_json()
        | {"interval": interval and list(interval), "alpha_intervals": [list(r) for r in rates]},
    }


def wilson(accepted: int, tried: int) -> tuple[float, float]:
    """Wilson's 99 % interval of a share; everything is possible if nothing was tried."""
    if not tried:
        return 0.0, 1.0
    share, square = accepted / tried, Z * Z / tried
    middle = (share + square / 2) / (1 + square)
    half = Z / (1 + square) * sqrt(share * (1 - share) / tried + square / (4 * tried))
    return middle - half, middle + half


def first_difference(a: list[int], b: list[int]) -> int | None:
    """The first position at which two answers differ, or at which only one has ended."""
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


def accepts_nothing(report: dict[str, Any]) -> bool:
    """Whether next to nothing is accepted of what was measured when the head was trained."""
    recorded = report["recorded"]
    if not recorded or not report["checks"]:
        return False
    best = max(check["engine"]["acceptance_length"] for check in report["checks"])
    return best - 1 < ALIVE * (recorded["acceptance_length"] - 1)


def passed(report: dict[str, Any]) -> bool:
    """Whether nothing is wrong."""
    return (
        bool(report["checks"])
        and all(check["close"] for check in report["checks"])
        and not report["differences"]
        and report["parity"]["close"]
        and report["parity"]["positions_equal"]
        and not accepts_nothing(report)
        and all(finding["verdict"] == NOTE for finding in report["findings"])
        and report.get("server", {}).get("prompts_equal", True)
    )


def show(report: dict[str, Any]) -> None:
    for check in report["checks"]:
        _show_check(check)
    if report["checks"]:
        _show_rest(report)
    for line in advice(report):
        log.warning("look at     %s", line)
    log.info("%s", "passed" if report["passed"] else "FAILED")


def _show_check(check: dict[str, Any]) -> None:
    ours = check["ours"]
    log.info("\n%s, %d prompts, greedy chain of %d", *_title(check))
    steps = len(ours["alpha"])
    log.info("%-8s %8s %s", "", "τ", " ".join(f"{f'α_{n}':>7}" for n in range(1, steps + 1)))
    for name, row in (("vLLM", check["engine"]), ("ours", ours)):
        rates = " ".join(f"{rate:7.4f}" for rate in row["alpha"])
        counts = f"{row['accepted']} accepted in {row['tried'][0]} rounds"
        log.info("%-8s %8.4f %s   %s", name, row["acceptance_length"], rates, counts)
    if check["counters_equal"]:
        verdict = "the same to the last draft token"
    else:
        verdict = f"τ differs by {100 * check['relative_difference']:+.2f} %, " + (
            "within our interval" if check["close"] else "OUTSIDE our interval"
        )
    low, high = ours["interval"] or (None, None)
    between = f"; ours lies in [{low:.3f}, {high:.3f}] with 95 %" if low is not None else ""
    log.info("%-8s %s%s", "", verdict, between)


def _title(check: dict[str, Any]) -> tuple[str, int, int]:
    return check["set"], check["prompts"], check["num_steps"]


def _show_rest(report: dict[str, Any]) -> None:
    parity = report["parity"]
    log.info(
        "\nmodule      vLLM's own head differs from ours by at most %.1e (of %.3g) at %d "
        "positions: %s",
        parity["max_difference"],
        parity["largest"],
        parity["positions"],
        "rounding" if parity["close"] else "MORE THAN ROUNDING",
    )
    if "server" in report:
        server = report["server"]
        log.info(
            "server      %d prompts through the chat endpoint: token ids %s, τ %.4f",
            server["prompts"],
            "those of the dump" if server["prompts_equal"] else "DIFFER from the dump's",
            server["acceptance_length"],
        )
    if not report["differences"]:
        log.info(
            "outputs     %d tokens are equal: engine with the head, without, ours (bonus token "
            "included in τ, %s)",
            report["num_tokens"],
            report["dtype"],
        )
    for difference in report["differences"][:10]:
        log.warning(
            "differs     %(set)s prompt %(prompt)s, K=%(num_steps)d, position %(position)d, "
            "against %(compared_with)s: %(engine_with_head)s there, %(other)s here%(tie)s",
            difference | {"tie": _tie(difference)},
        )


def _tie(difference: dict[str, Any]) -> str:
    if "logit_gap" not in difference:
        return ""
    kind = "a near-tie" if difference["near_tie"] else "no near-tie"
    return f"; logit gap {difference['logit_gap']:.2g}, {kind}"


def advice(report: dict[str, Any]) -> list[str]:
    """What to look at after a failed check, most likely cause first."""
    lines = []
    wrong = [one for one in report["findings"] if one["verdict"] != NOTE]
    if wrong:
        lines.append(
            f"the folder: {', '.join(sorted({one['rule'] for one in wrong}))}. "
            "`check_export path=FOLDER fix=true out=NEW` repairs what can be repaired"
        )
    if not report["checks"]:
        return lines
    if accepts_nothing(report):
        lines.append(
            f"hardly anything is accepted, but τ was {report['recorded']['acceptance_length']:.2f} "
            "when the head was trained: another network, another target, or prompts of another kind"
        )
    if report["differences"]:
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
    if not report["parity"]["close"]:
        lines.append("the engine's module computes other features: see the parity in the report")
    far = [check for check in report["checks"] if not check["close"]]
    if any(check["relative_difference"] < 0 for check in far):
        lines.append(
            "the engine accepts less, as if the head it built were another: export again with "
            "this version, and look in with_head_*.log for tensors it skipped or warned about"
        )
    if far:
        lines.append(
            "engine versions differ in how they feed heads: compare with the version in "
            "constraints.txt"
        )
    return lines
