"""What measured answers come to: acceptance with its interval, speed, and where the time went.

An answer is a line of OUT/answers.jsonl (train/measure/answers.py says what it holds).
"""

from collections.abc import Sequence
from typing import Any

from train.acceptance import ChainCounts, length_interval

Answer = dict[str, Any]
PHASES = ("total", "prefill", "draft", "verify", "other")
NO_CATEGORY = "no category"


def summaries(answers: Sequence[Answer], *, num_steps: int) -> dict[str, Any]:
    """Overall, by prompt set, and by category of each set."""

    def one(members: Sequence[Answer]) -> dict[str, Any]:
        return summary(members, num_steps=num_steps)

    sets = {}
    for name, members in _grouped(answers, "set").items():
        categories = _grouped(members, "category")
        sets[name] = one(members) | {"categories": {c: one(m) for c, m in categories.items()}}
    return {"overall": one(answers), "sets": sets}


def summary(answers: Sequence[Answer], *, num_steps: int) -> dict[str, Any]:
    """Acceptance and speed over some answers; seconds are sums."""
    drafted, plain = ([answer[way] for answer in answers] for way in ("drafted", "plain"))
    counts = acceptance(answers, num_steps=num_steps)
    tokens = {"with_head": _tokens(drafted), "without_head": _tokens(plain)}
    seconds = {"with_head": _seconds(drafted), "without_head": _seconds(plain)}
    speed = {way: _rate(tokens[way], seconds[way]["total"]) for way in tokens}
    # The first token of an answer comes from the prefill, which no head makes faster.
    later = {
        way: _rate(tokens[way] - len(answers), seconds[way]["total"] - seconds[way]["prefill"])
        for way in tokens
    }
    return {
        "answers": len(answers),
        "tokens": tokens["with_head"],
        "rounds": sum(len(one["accepted"]) for one in drafted),
        **counts,
        "tokens_per_second": speed,
        "speedup": _rate(speed["with_head"], speed["without_head"]),
        "tokens_per_second_after_prefill": later,
        "speedup_after_prefill": _rate(later["with_head"], later["without_head"]),
        "seconds": seconds,
        "baselines": {
            name: _baseline(answers, name, plain_speed=speed["without_head"])
            for name in (answers[0]["baselines"] if answers else {})
        },
    }


def acceptance(answers: Sequence[Answer], *, num_steps: int) -> dict[str, Any]:
    """α by step with its counts, τ with and without the bonus token, and τ's interval.

    Prompts are drawn for the interval, not turns: the turns of one resemble each other.
    """
    counts = [
        ChainCounts.of_rounds(answer["drafted"]["accepted"], num_steps=num_steps)
        for answer in answers
    ]
    total = sum(counts, ChainCounts.zeros(num_steps))
    interval = None
    if counts:
        interval = length_interval(
            _stacked([one.tried for one in counts]),
            _stacked([one.accepted for one in counts]),
            [f"{answer['set']}\0{answer['prompt']}" for answer in answers],
        )
    return {
        **total.to_json(),
        "acceptance_length_without_bonus": total.length - 1,
        "interval": list(interval) if interval else None,
    }


def shares(seconds: dict[str, float]) -> dict[str, float]:
    """Parts of the total, by phase."""
    return {name: _rate(seconds[name], seconds["total"]) for name in PHASES[1:]}


def _baseline(answers: Sequence[Answer], name: str, *, plain_speed: float) -> dict[str, Any]:
    runs = [answer["baselines"][name] for answer in answers]
    forwards = sum(run["forwards"] for run in runs)
    speed = _rate(_tokens(runs), sum(run["seconds"]["total"] for run in runs))
    return {
        "tokens": _tokens(runs),
        "forwards": forwards,
        "acceptance_length": _rate(_tokens(runs), forwards),
        "tokens_per_second": speed,
        "speedup": _rate(speed, plain_speed),
        "outputs_equal": sum(
            run["tokens"] == answer["plain"]["tokens"]
            for run, answer in zip(runs, answers, strict=True)
        ),
    }


def _grouped(answers: Sequence[Answer], key: str) -> dict[str, list[Answer]]:
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(answer[key] or NO_CATEGORY, []).append(answer)
    return groups


def _stacked(rows: list) -> Any:
    return rows[0].new_tensor([row.tolist() for row in rows])


def _tokens(runs: Sequence[dict[str, Any]]) -> int:
    return sum(len(run["tokens"]) for run in runs)


def _seconds(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {name: sum(run["seconds"][name] for run in runs) for name in PHASES}


def _rate(amount: float, per: float) -> float:
    return amount / per if amount else 0.0  # nothing after the prefill: no time either
