"""Which tree to draft: the one that is asked for, or the fastest by what was measured here.

`tree=auto` weighs what the head's guesses are worth (ranks.py) against what a forward over so many
rows costs on this machine (costs.py), by the speed model (speed_model.py).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from data.chats.prompts import Prompt, prompt_ids
from data.targets.model import Target
from train.config import EvaluateConfig
from train.decode import Drafting, Sampling, best_shape, plain_generate, stop_ids_of
from train.head import DraftHead
from train.measure.answer_log import AnswerLog
from train.measure.costs import Costs
from train.measure.ranks import measure_ranks
from train.measure.speed_model import (
    Plan,
    by_batch_size,
    candidates,
    expected_speedup,
    fastest,
    stops_paying,
)
from train.measure.summary import Answer

log = logging.getLogger(__name__)

DEPTH, WIDTH = 6, 8  # of the largest tree that is looked at
TOPK, NUM_DRAFT_TOKENS = 4, 8  # of a tree, where nothing is said; SGLang's for Llama targets
MAX_ANSWERS = 64  # whose ranks are measured: more would hardly move a rate


def requested(
    tree: str, *, num_steps: int, topk: int | None, num_draft_tokens: int | None
) -> Drafting:
    """A chain or a dynamic tree. Raises ValueError for sizes that do not go together."""
    if tree == "chain":
        return Drafting.chain(num_steps)
    return Drafting.dynamic(
        num_steps=num_steps,
        topk=topk or TOPK,
        num_draft_tokens=num_draft_tokens or NUM_DRAFT_TOKENS,
    )


def choose_drafting(
    config: EvaluateConfig,
    target: Target,
    head: DraftHead,
    costs: Costs,
    prompts: Sequence[Prompt],
    answers: AnswerLog,
    *,
    limit: int,
) -> Drafting:
    """How to draft in this evaluation; decided once and kept in the log of its answers.

    prompts: the first `tree_prompts` of them that have at most `limit` tokens are answered to
             shape a static tree or to choose one
    """
    if config.tree in ("chain", "dynamic"):
        return requested(
            config.tree,
            num_steps=config.num_steps,
            topk=config.topk,
            num_draft_tokens=config.num_draft_tokens,
        )

    def measure() -> dict[str, Any]:
        log.info("tree        answering %d prompts to choose it", config.tree_prompts)
        return _first_rates(config, target, head, prompts, limit)

    rates = answers.once("rates", measure)["rates"]
    if config.tree == "static":
        wide = [row[: config.topk or TOPK] for row in rates[: config.num_steps]]
        size = config.num_draft_tokens or NUM_DRAFT_TOKENS
        return Drafting.static(best_shape(wide, num_draft_tokens=size))
    plans = list(candidates(rates, costs, batch_size=config.batch_size))
    best = fastest(plans)
    for line in tree_table([plan.to_json() for plan in plans], best.to_json()):
        log.info("%s", line)
    return drafting_of(best)


def drafting_of(plan: Plan) -> Drafting:
    """A chain where one child is best, else a dynamic tree."""
    if plan.topk == 1:
        return Drafting.chain(plan.num_steps)
    return Drafting.dynamic(
        num_steps=plan.num_steps, topk=plan.topk, num_draft_tokens=plan.num_draft_tokens
    )


def _first_rates(
    config: EvaluateConfig, target: Target, head: DraftHead, prompts: Sequence[Prompt], limit: int
) -> dict[str, Any]:
    """What the head's guesses are worth on the target's answers to the first prompts."""
    pairs: list[tuple[list[int], list[int]]] = []
    sampling = Sampling(
        temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, seed=config.seed
    )
    for prompt in prompts:
        ids = prompt_ids(target.tokenizer, prompt.messages)
        if len(ids) <= limit and len(pairs) < config.tree_prompts:
            answer = plain_generate(
                target,
                torch.tensor(ids),
                sampling=sampling,
                max_new_tokens=config.max_new_tokens,
                stop_ids=stop_ids_of(target),
            )
            pairs.append((ids, answer.tokens))
    depth = max(DEPTH, config.num_steps)
    ranks = measure_ranks(target, head, pairs, num_steps=depth, topk=_width(target))
    return {"rates": ranks.rates, "tried": ranks.tried}


def _width(target: Target) -> int:
    return min(WIDTH, len(target.head.weight))


@dataclass(frozen=True, kw_only=True)
class TreeChoice:
    """What was measured, and the trees that it speaks for."""

    rates: list[list[float]]  # [D][k]
    tried: list[int]  # [D]
    plans: list[Plan]  # the best size of each depth and width
    costs: Costs
    batch_size: int

    @classmethod
    def measured(
        cls,
        target: Target,
        head: DraftHead,
        answers: Sequence[Answer],
        costs: Costs,
        *,
        batch_size: int,
    ) -> "TreeChoice | None":
        """From the target's own answers, at most MAX_ANSWERS; None if all are one token long."""
        every = max(1, len(answers) // MAX_ANSWERS)
        pairs = [
            (answer["prompt_ids"], answer["plain"]["tokens"])
            for answer in answers[::every]
            if len(answer["plain"]["tokens"]) > 1
        ]
        if not pairs:
            return None
        ranks = measure_ranks(target, head, pairs, num_steps=DEPTH, topk=_width(target))
        plans = list(candidates(ranks.rates, costs, batch_size=batch_size))
        return cls(
            rates=ranks.rates, tried=ranks.tried, plans=plans, costs=costs, batch_size=batch_size
        )

    @property
    def best(self) -> Plan:
        return fastest(self.plans)

    @property
    def best_chain(self) -> Plan:
        return fastest([plan for plan in self.plans if plan.topk == 1])

    def to_json(self, drafting: Drafting, *, length: float) -> dict[str, Any]:
        """For the report, with what to expect of the measured drafting at other batch sizes.

        length: τ of `drafting` as it was measured
        """
        shape = {
            "num_steps": drafting.num_steps,
            "topk": drafting.topk,
            "num_draft_tokens": drafting.num_draft_tokens,
        }
        speedup = expected_speedup(self.costs, length, batch_size=self.batch_size, **shape)
        plan = Plan(length=length, speedup=speedup, batch_size=self.batch_size, **shape)
        expected = by_batch_size(self.costs, plan)
        return {
            "ranks": {"rates": self.rates, "tried": self.tried},
            "tree_table": [one.to_json() for one in self.plans],
            "best_tree": self.best.as_sglang(),
            "best_chain": self.best_chain.as_sglang(),
            "speed_model": {
                "expected_speedup": speedup,
                "by_batch_size": [
                    {
                        "batch_size": one.batch_size,
                        "speedup": one.speedup,
                        "tokens_per_second_without_head": one.batch_size
                        / self.costs.target_seconds(one.batch_size),
                    }
                    for one in expected
                ],
                "stops_paying_at": stops_paying(expected),
            },
        }


def tree_table(plans: Sequence[dict[str, Any]], best: dict[str, Any]) -> list[str]:
    """Expected speed-up by depth and width, with τ and the size that is best for them.

    plans, best: as `Plan.to_json` gives them
    """
    widths = sorted({plan["topk"] for plan in plans})
    cells = {(plan["num_steps"], plan["topk"]): plan for plan in plans}
    lines = [
        "expected speed-up (τ, nodes with the root) by depth and width, at batch size "
        f"{best['batch_size']}",
        "depth" + "".join(f"{f'width {width}':>19}" for width in widths),
    ]
    for depth in sorted({plan["num_steps"] for plan in plans}):
        row = f"{depth:>5}"
        for width in widths:
            plan = cells[depth, width]
            mark = "*" if plan == best else " "
            nodes, length = plan["num_draft_tokens"], plan["length"]
            row += f"{plan['speedup']:.2f}x ({length:.2f},{nodes:>3}){mark}".rjust(19)
        lines.append(row.rstrip())
    lines.append("* the fastest; a smaller one where it is not clearly slower")
    return lines
