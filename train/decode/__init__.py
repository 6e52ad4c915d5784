"""Drafting and verifying: lossless speculative decoding with a draft head."""

from train.decode.answers import Generation
from train.decode.clock import Seconds
from train.decode.drafting import Drafting
from train.decode.generate import plain_generate, speculative_generate
from train.decode.head_stream import HeadStream, as_served
from train.decode.rounds import Round
from train.decode.sampling import GREEDY, Sampling, Typical
from train.decode.static_tree import best_shape
from train.decode.stops import stop_ids_of
from train.decode.target_stream import TargetStream
from train.decode.ties import Recheck, explain_difference, recheck

__all__ = [
    "GREEDY",
    "Drafting",
    "Generation",
    "HeadStream",
    "Recheck",
    "Round",
    "Sampling",
    "Seconds",
    "TargetStream",
    "Typical",
    "as_served",
    "best_shape",
    "explain_difference",
    "plain_generate",
    "recheck",
    "speculative_generate",
    "stop_ids_of",
]
