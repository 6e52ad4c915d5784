"""An evaluation as a text for the terminal, and the words that the page shares with it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.measure.choose_tree import tree_table
from train.measure.summary import NO_CATEGORY, shares

COUNTING = """\
Counted as serving engines count. A round is one forward of the target that verifies drafts; the
first token of an answer comes from the prefill and is no round. α_n is the share of rounds in
which draft token n was accepted, among those in which 1 ... n-1 were. τ is tokens per round, the
bonus token that every round yields included: τ = 1 + accepted / rounds; τ-1 is without it.
Five rounds that accept 2, 0, 3, 1 and 0 of 3 draft tokens: α = 3/5, 2/3, 1/2 and τ = 1 + 6/5 = 2.2.
A round counts whole, also where the answer ends inside it. Papers count a first draft token that
is always accepted: it is the bonus token of the round before. [ ] is the 95 % confidence interval
of τ, from drawing prompts with replacement."""
WAYS = {"prompt_lookup": "prompt lookup", "assistant": "assistant model"}
PHASES = {"draft": "drafting", "verify": "verifying", "prefill": "prefill", "other": "other"}
MAX_DIFFERENCES = 8  # shown one by one


def table(report: dict[str, Any]) -> str:
    """The report for a terminal, about 110 columns wide."""
    blocks: list[list[str]] = [
        _head(report),
        _acceptance_table(report),
        _ways_table(report),
        _figures(report),
        _speed_model(report),
        [COUNTING],
    ]
    return "\n\n".join("\n".join(block) for block in blocks)


def drafting_text(report: dict[str, Any]) -> str:
    """What was drafted, for people."""
    drafting = report["settings"]["drafting"]
    if drafting["tree"] == "chain":
        return f"chain of {drafting['num_steps']}"
    return (
        f"{drafting['tree']} tree of {drafting['num_draft_tokens']} nodes with the root, depth "
        f"{drafting['num_steps']}, {drafting['topk']} children a node"
    )


def target_name(report: dict[str, Any]) -> str:
    """The end of the target's path, or its hub id: two names tell more than one."""
    return "/".join(Path(report["settings"]["target"]["path"]).parts[-2:])


def sampling_text(settings: dict[str, Any]) -> str:
    """Greedy, or the temperature and what cuts the distribution."""
    if not settings["temperature"]:
        return "greedy (temperature 0)"
    cuts = [f"top_p {settings['top_p']:g}"] if settings["top_p"] < 1 else []
    cuts += [f"top_k {settings['top_k']}"] if settings["top_k"] else []
    return ", ".join([f"temperature {settings['temperature']:g}", *cuts])


def equality_text(report: dict[str, Any]) -> str:
    """How many answers are those of plain decoding, and what the others are."""
    answers, equal = report["overall"]["answers"], report["outputs_equal"]
    if report["settings"]["temperature"]:
        return (
            f"{equal} of {answers} answers equal plain decoding with the same random numbers; "
            "drawn answers may differ by chance, so this proves nothing either way"
        )
    if equal == answers:
        return f"{answers} of {answers} answers equal plain decoding token for token"
    ties = sum(difference["near_tie"] for difference in report["differences"])
    return f"{equal} of {answers} answers equal plain decoding; of the others {ties} are near-ties"


def rows_of(report: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The summaries that tables show: sets, or the categories of an only set, and all of them."""
    sets = report["sets"]
    rows = list(sets.items())
    if len(sets) == 1:
        categories = next(iter(sets.values()))["categories"]
        rows = list(categories.items()) if set(categories) != {NO_CATEGORY} else rows
    return [*rows, ("all", report["overall"])] if len(rows) > 1 else rows


def _head(report: dict[str, Any]) -> list[str]:
    settings, machine = report["settings"], report["machine"]
    return [
        f"head      {settings['head']}",
        f"target    {settings['target']['path']}, {settings['dtype']} on {machine['device']}, "
        f"{machine['threads']} threads, torch {machine['torch']}, "
        f"transformers {machine['transformers']}",
        f"drafting  {drafting_text(report)}",
        f"decoding  {sampling_text(settings)}, batch size {settings['batch_size']}, up to "
        f"{settings['max_new_tokens']} tokens an answer to {', '.join(report['sets'])}",
    ]


def _acceptance_table(report: dict[str, Any]) -> list[str]:
    steps = range(1, report["settings"]["drafting"]["num_steps"] + 1)
    header = ["", "answers", "tokens", "rounds", *(f"α{n}" for n in steps), "τ", "", "τ-1"]
    header += ["with", "without", "ratio"]
    rows = rows_of(report)
    lines = _aligned([header, *(_row(name, one) for name, one in rows)])
    speeds = "tokens/s".rjust(len(lines[0]) - 7)
    return [speeds, *_ruled(lines, has_total=len(rows) > 1)]


def _row(name: str, summary: dict[str, Any]) -> list[str]:
    alpha = zip(summary["alpha"], summary["tried"], strict=True)
    speed, between = summary["tokens_per_second"], summary["interval"]
    some = bool(summary["rounds"])
    return [
        name,
        str(summary["answers"]),
        str(summary["tokens"]),
        str(summary["rounds"]),
        *(f"{rate:.3f}" if tried else "-" for rate, tried in alpha),
        f"{summary['acceptance_length']:.3f}" if some else "-",
        f"[{between[0]:.2f}, {between[1]:.2f}]" if some and between else "",
        f"{summary['acceptance_length_without_bonus']:.3f}" if some else "-",
        f"{speed['with_head']:.1f}",
        f"{speed['without_head']:.1f}",
        f"{summary['speedup']:.2f}x",
    ]


def _ways_table(report: dict[str, Any]) -> list[str]:
    overall = report["overall"]
    speed, answers = overall["tokens_per_second"], overall["answers"]

    def equal(count: int) -> str:
        return f"{count} of {answers}"

    head = f"{overall['acceptance_length']:.3f}", f"{speed['with_head']:.1f}"
    rows = [
        ["way", "τ", "tokens/s", "ratio", "answers equal"],
        ["plain decoding", "1.000", f"{speed['without_head']:.1f}", "1.00x", ""],
        ["this head", *head, f"{overall['speedup']:.2f}x", equal(report["outputs_equal"])],
    ]
    for name, one in overall["baselines"].items():
        figures = f"{one['acceptance_length']:.3f}", f"{one['tokens_per_second']:.1f}"
        row = [WAYS[name], *figures, f"{one['speedup']:.2f}x", equal(one["outputs_equal"])]
        rows.append(row)
    lines = _ruled(_aligned(rows), has_total=False)
    if overall["baselines"]:
        lines.append(
            "τ of the baselines is tokens per forward of the target, the one over the prompt "
            "included: it checks drafts, too."
        )
    return lines


def _figures(report: dict[str, Any]) -> list[str]:
    overall = report["overall"]
    calibration = report["calibration"]
    error = calibration["expected_calibration_error"]
    lines = [
        "accepted  " + (", ".join(_counts(overall)) or "no round"),
        f"speed     {_speeds(overall, '')}, prefill included",
        f"          {_speeds(overall, '_after_prefill')}, after the prefill",
        f"time      {_shares(overall)}",
        f"output    {equality_text(report)}",
        *(f"          {_explained(one)}" for one in report["differences"][:MAX_DIFFERENCES]),
    ]
    if error is not None:
        lines.append(
            f"trust     the head's confidence is off by {error:.3f} on average over "
            f"{calibration['nodes']:,} draft tokens (expected calibration error)"
        )
    if report["too_long"]:
        lines.append(f"left out  {len(report['too_long'])}, as too long")
    return lines + [f"WARNING   other target: {line}" for line in report["fingerprint_differences"]]


def _speed_model(report: dict[str, Any]) -> list[str]:
    if "speed_model" not in report:
        return ["no speed model: all answers are one token long"]
    model, best = report["speed_model"], report["best_tree"]
    by_size = model["by_batch_size"]
    plans = report["tree_table"]
    shape = ("num_steps", "topk", "num_draft_tokens")
    wanted = (
        best["speculative_num_steps"],
        best["speculative_eagle_topk"],
        best["speculative_num_draft_tokens"],
    )
    chosen = next(plan for plan in plans if tuple(plan[key] for key in shape) == wanted)
    measured = report["overall"]["speedup_after_prefill"]
    return [
        f"on paper  {model['expected_speedup']:.2f}x is expected from τ and the cost of single "
        f"forwards; measured after the prefill: {measured:.2f}x",
        "batch     " + "".join(f"{one['batch_size']:>8}" for one in by_size),
        "expected  " + "".join(f"{one['speedup']:>7.2f}x" for one in by_size),
        f"          {pays_text(model)}",
        "",
        *tree_table(plans, chosen),
    ]


def pays_text(model: dict[str, Any]) -> str:
    """Up to which batch size speculation pays on this machine."""
    stop, sizes = model["stops_paying_at"], [one["batch_size"] for one in model["by_batch_size"]]
    if stop is None:
        return f"speculation pays at every batch size up to {sizes[-1]}"
    if stop == sizes[0]:
        return "speculation does not pay on this machine at any batch size"
    return f"speculation stops paying at batch size {stop}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _ruled(lines: list[str], *, has_total: bool) -> list[str]:
    """With a line under the header, and one above the last row if that is the total."""
    rule = "-" * max(map(len, lines))
    body = [*lines[1:-1], rule, lines[-1]] if has_total else lines[1:]
    return [lines[0], rule, *body]


def _counts(summary: dict[str, Any]) -> list[str]:
    pairs = zip(summary["accepted"], summary["tried"], strict=True)
    return [f"{a} of {t} at step {n}" for n, (a, t) in enumerate(pairs, start=1) if t]


def _speeds(summary: dict[str, Any], suffix: str) -> str:
    speed, ratio = summary[f"tokens_per_second{suffix}"], summary[f"speedup{suffix}"]
    with_head, without = speed["with_head"], speed["without_head"]
    return f"{with_head:.1f} tokens/s with the head, {without:.1f} without ({ratio:.2f}x)"


def _shares(summary: dict[str, Any]) -> str:
    parts = shares(summary["seconds"]["with_head"])
    return ", ".join(f"{text} {100 * parts[name]:.1f} %" for name, text in PHASES.items())


def _explained(difference: dict[str, Any]) -> str:
    place = (
        f"{difference['set']} {difference['prompt']} turn {difference['turn']}, token "
        f"{difference['position']}"
    )
    if difference["logit_gap"] is None:
        both = difference["with_head"] and difference["without_head"]
        unseen = "drawn otherwise, or of a quantised target: not looked into"
        return f"{place}: {unseen if both else 'one answer ends, the other goes on'}"
    kind = "near-tie" if difference["near_tie"] else "NOT a near-tie"
    return (
        f"{place}: {kind}, logits {difference['logit_gap']:.2g} apart where rounding moves "
        f"them by {difference['rounding']:.2g}"
    )
