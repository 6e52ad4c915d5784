"""A few draft trees of a run, with their words: what a round looks like."""

from collections.abc import Sequence
from typing import Any

CONTEXT = 24  # tokens shown before the tree


def example_trees(answers: Sequence[dict[str, Any]], tokenizer: Any) -> list[dict[str, Any]]:
    """The round that accepted most, one that accepted one token, and one that accepted none."""
    places = [
        (answer, number) for answer in answers for number in range(len(answer["drafted"]["rounds"]))
    ]

    def accepted(place: tuple[dict[str, Any], int]) -> int:
        return len(place[0]["drafted"]["rounds"][place[1]]["path"])

    chosen = []
    if places:
        most = max(places, key=accepted)
        chosen = [most]
        # From the middle of the run: its beginning is often a greeting.
        middle = places[len(places) // 2 :] + places[: len(places) // 2]
        for count in (1, 0):
            same = [place for place in middle if accepted(place) == count]
            if same and count < accepted(most):
                chosen.append(same[0])
    return [_example(answer, number, tokenizer) for answer, number in chosen]


def _example(answer: dict[str, Any], number: int, tokenizer: Any) -> dict[str, Any]:
    drafted = answer["drafted"]
    one = drafted["rounds"][number]
    # The first token is the prefill's; each round adds what it accepted and the bonus token.
    known = 1 + sum(count + 1 for count in drafted["accepted"][:number])
    before = (answer["prompt_ids"] + drafted["tokens"][:known])[-CONTEXT:]
    return {
        "set": answer["set"],
        "prompt": answer["prompt"],
        "turn": answer["turn"],
        "round": number + 1,
        # It may begin inside a character.
        "context": tokenizer.decode(before, skip_special_tokens=True).lstrip("\ufffd"),
        "texts": [tokenizer.decode([token]) for token in one["tokens"]],
        "parents": one["parents"],
        "confidences": one["confidences"],
        "path": one["path"],
        "bonus": tokenizer.decode([one["bonus"]]),
    }
