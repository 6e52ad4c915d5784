"""The cross-entropy over the most frequent tokens only (FR-Spec, arXiv 2502.14856, section 3).

The output head's products are most of a training step, and few tokens make most of a text. The
exported head is the same either way: it predicts features, and drafts over the whole vocabulary.
"""

import logging

import torch
from torch import Tensor

from data.cache.reader import FeatureCache
from data.targets.model import TargetHead

log = logging.getLogger(__name__)


def frequent_head(
    target_head: TargetHead, cache: FeatureCache, sequences: list[int], *, count: int
) -> TargetHead:
    """The output head over the `count` tokens most frequent in the replies; prints the coverage.

    The target's probabilities are renormalised over them, by the softmax over their logits alone.
    """
    frequency = reply_token_counts(cache, sequences, vocab_size=len(target_head.weight))
    # Ties to the smaller id, so that every process and every resumed run picks the same.
    order = frequency.argsort(descending=True, stable=True)[:count]
    log.info(
        "loss.vocab=%d: %d of %d vocabulary entries, which are %.2f %% of the reply tokens",
        count,
        len(order),
        len(frequency),
        100 * float(frequency[order].sum() / frequency.sum()),
    )
    return target_head.restricted(order.to(target_head.weight.device))


def reply_token_counts(cache: FeatureCache, sequences: list[int], *, vocab_size: int) -> Tensor:
    """How often each token stands in a reply: [V] int64."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for index in sequences:
        input_ids, loss_mask = cache.tokens(index)
        counts += torch.bincount(input_ids[loss_mask], minlength=vocab_size)
    return counts
