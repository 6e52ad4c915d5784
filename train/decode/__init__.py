"""Drafting and verifying: lossless speculative decoding with a draft head."""

from train.decode.chain import DraftCache, as_served, draft_chain
from train.decode.generate import (
    Generation,
    Seconds,
    plain_generate,
    speculative_generate,
    stop_ids_of,
)
from train.decode.verify import TargetStream, count_accepted

__all__ = [
    "DraftCache",
    "Generation",
    "Seconds",
    "TargetStream",
    "as_served",
    "count_accepted",
    "draft_chain",
    "plain_generate",
    "speculative_generate",
    "stop_ids_of",
]
