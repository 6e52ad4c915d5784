"""The held-out estimate beside drafting one chain after the other, as the papers' code does it."""

import time
from dataclasses import dataclass, replace

from data.batches import PackedBatch
from train.acceptance import chain_acceptance, prepare_batch
from train.bench.plain import plain_estimate
from train.fit.setup import Run

PAIRS = 512  # of the document that is drafted one by one: longer ones take minutes


@dataclass(frozen=True)
class EstimateTimes:
    """Supervised positions a second."""

    ours: float  # all held-out positions at once
    one_by_one: float
    places: int  # how many were drafted one by one

    @property
    def ratio(self) -> float:
        return self.ours / self.one_by_one


def time_estimate(run: Run) -> EstimateTimes:
    """Time both on held-out documents; in both the target's own tokens are found anew.

    Raises RuntimeError unless both count the same in the document that both have drafted.
    """
    head = run.accelerator.unwrap_model(run.head)
    num_steps = run.config.heldout.num_steps

    began = time.perf_counter()
    for batch in run.heldout:
        batch = prepare_batch(batch.packed, batch.names, run.target_head)
        chain_acceptance(head, run.target_head, [batch], num_steps=num_steps)
    positions = sum(len(batch.packed.supervised) for batch in run.heldout)
    ours = positions / (time.perf_counter() - began)

    document = _first_document(run.heldout[0].packed)
    began = time.perf_counter()
    plain = plain_estimate(head, run.target_head, document, num_steps=num_steps)
    one_by_one = len(document.supervised) / (time.perf_counter() - began)

    batch = prepare_batch(document, ["document"], run.target_head)
    counts = chain_acceptance(head, run.target_head, [batch], num_steps=num_steps).counts
    if counts.to_json() != plain.to_json():
        raise RuntimeError(
            f"The estimate counts {counts.to_json()}, drafting one by one {plain.to_json()}, in "
            f"{run.heldout[0].names[0]}. They are the same unless logits tie: try another seed."
        )
    return EstimateTimes(ours, one_by_one, len(document.supervised))


def _first_document(batch: PackedBatch) -> PackedBatch:
    """The first PAIRS pairs of a batch's first document."""
    length = min(batch.lengths[0], PAIRS)
    supervised = batch.supervised[batch.supervised < length]
    return replace(
        batch,
        sequences=batch.sequences[:1],
        lengths=[length],
        next_ids=batch.next_ids[:length],
        features=batch.features[:length],
        supervised=supervised,
        target_features=batch.target_features[: len(supervised)],
    )
