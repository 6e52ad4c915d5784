"""Drafting and verifying: lossless speculative decoding with a draft head."""

from train.decode.chain import DraftCache, as_served, draft_chain
from train.decode.clock import Seconds
from train.decode.drafting import Drafting
from train.decode.generate import Generation, Round, plain_generate, speculative_generate
from train.decode.sampling import GREEDY, Sampling, Typical
from train.decode.stops import stop_ids_of
from train.decode.verify import TargetStream, count_accepted

__all__ = [
    "GREEDY",
    "DraftCache",
    "Drafting",
    "Generation",
    "Round",
    "Sampling",
    "Seconds",
    "TargetStream",
    "Typical",
    "as_served",
    "count_accepted",
    "draft_chain",
    "plain_generate",
    "speculative_generate",
    "stop_ids_of",
]
