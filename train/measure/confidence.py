"""Whether the head's confidence in a draft token tells how likely the target accepts it.

EAGLE-2 (arXiv 2406.16858, section 3.2) found that it does, and builds its trees on that. Here the
confidence of a node is the head's own probability of its token, given the path to it; a node
counts if the target came to it, which means that its parent was accepted.
"""

from collections.abc import Iterable, Iterator
from typing import Any

NUM_BINS = 20


def tried_nodes(rounds: Iterable[dict[str, Any]]) -> Iterator[tuple[float, bool]]:
    """Confidence of each node that the target came to, and whether it was accepted.

    rounds: recorded with the head's likeliest tokens as children; the target's own next token
            settles all children of an accepted node at once
    """
    for one in rounds:
        path = set(one["path"])
        for node, parent in enumerate(one["parents"]):
            if parent == 0 or parent in path:
                yield one["confidences"][node], node in path


def calibration(nodes: Iterable[tuple[float, bool]], *, num_bins: int = NUM_BINS) -> dict[str, Any]:
    """Confidence against acceptance, in bins of equal width.

    The expected calibration error is Σ_b n_b / n · |accepted_b - confidence_b|, 0 for a head whose
    confidence is the chance of acceptance.
    """
    counts, hits, sums = [0] * num_bins, [0] * num_bins, [0.0] * num_bins
    for confidence, accepted in nodes:
        place = min(int(confidence * num_bins), num_bins - 1)
        counts[place] += 1
        hits[place] += accepted
        sums[place] += confidence
    total = sum(counts)
    bins = [
        {
            "from": place / num_bins,
            "to": (place + 1) / num_bins,
            "nodes": count,
            "confidence": sums[place] / count,
            "accepted": hits[place] / count,
        }
        for place, count in enumerate(counts)
        if count
    ]
    errors = (b["nodes"] * abs(b["accepted"] - b["confidence"]) for b in bins)
    return {
        "nodes": total,
        "bins": bins,
        "expected_calibration_error": sum(errors) / total if total else None,
    }
