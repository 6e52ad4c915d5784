"""What chats look like as tokens: figures of sequences, replies and mask, in flat memory."""

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.cache.reader import supervised_counts
from data.chats.tokens import Tokens

PIECE = 1 << 20  # tokens looked at together
BAR = 30  # characters of the longest bar of a histogram


@dataclass(frozen=True)
class Spread:
    """Where many numbers lie. A quantile is the smallest of them that so many do not exceed."""

    min: float
    p5: float
    median: float
    mean: float
    p95: float
    max: float


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Figures of many sequences. A reply is a stretch of supervised tokens, its end included."""

    max_length: int  # what sequences were cut to, in tokens
    sequences: int
    distinct: int  # sequences that differ from each other
    tokens: int
    supervised: int  # tokens of replies
    pairs: int  # supervised pairs: what the loss counts, each reply's first token left out
    at_max_length: int  # sequences of max_length tokens: as good as all of them were cut
    replies: int
    cut_replies: int  # cut off by max_length, before their end-of-turn token
    ended_replies: int  # the last token is an end-of-turn token
    lengths: Spread  # tokens of a sequence
    shares: Spread  # supervised tokens of a sequence, in percent of its tokens
    replies_each: Spread  # replies of a sequence
    reply_lengths: Spread  # tokens of a reply
    top_token: int  # the most frequent supervised token
    top_text: str  # what it stands for
    top_count: int
    histogram: list[int]  # sequences of 1, 2, 3-4, 5-8, 9-16, … tokens

    @property
    def share(self) -> float:
        """Supervised tokens over all tokens, 0 to 1."""
        return self.supervised / self.tokens

    @property
    def ended_share(self) -> float:
        """Replies that end with an end-of-turn token, over those not cut off; nan if all were."""
        whole = self.replies - self.cut_replies
        return self.ended_replies / whole if whole else float("nan")


def pieces(tokens: Tokens) -> Iterator[Tokens]:
    """Whole sequences of about PIECE tokens at a time: only they are read from a mapped file."""
    first, last = 0, len(tokens.offsets) - 1
    while first < last:
        begin = tokens.offsets[first]
        fitting = int(torch.searchsorted(tokens.offsets, begin + PIECE, right=True)) - 1
        after = max(fitting, first + 1)
        rows = slice(int(begin), int(tokens.offsets[after]))
        offsets = tokens.offsets[first : after + 1] - begin
        yield Tokens(tokens.input_ids[rows], tokens.loss_mask[rows], offsets)
        first = after


def measure(
    pieces: Iterable[Tokens],
    *,
    max_length: int,
    end_tokens: Collection[int],
    spell: Callable[[list[int]], str],
) -> Statistics:
    """Figures of all sequences. Memory: one piece, and 8 bytes for each sequence.

    end_tokens  ids that end a turn
    spell       from ids to text, to name the most frequent one

    Raises ValueError if nothing is supervised.
    """
    ends = torch.tensor(sorted(end_tokens))
    totals: Counter[str] = Counter()
    histograms: dict[str, Tensor] = {}
    digests = array("Q")
    for piece in pieces:
        counts, values = _of_piece(piece, max_length, ends)
        totals.update(counts)
        for name, numbers in values.items():
            histograms[name] = _added(histograms.get(name), numbers)
        digests.extend(_digests(piece))
    if not totals["supervised"]:
        raise ValueError("Nothing is supervised: there is nothing to measure.")
    used = histograms.pop("supervised_ids")
    spreads = {name: _spread(histogram) for name, histogram in histograms.items()}
    top = int(used.argmax())
    return Statistics(
        max_length=max_length,
        distinct=len(np.unique(np.array(digests))),
        **totals,
        lengths=spreads["lengths"],
        shares=_scaled(spreads["permille"], 0.1),
        replies_each=spreads["replies_each"],
        reply_lengths=spreads["reply_lengths"],
        top_token=top,
        top_text=spell([top]),
        top_count=int(used[top]),
        histogram=_doubling(histograms["lengths"]),
    )


def reply_spans(loss_mask: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last token of each reply, which lies in one sequence.

    loss_mask: [N]    bool
    offsets:   [S+1]  int64
    returns    [R], [R]  int64, indices among the N
    """
    starts = torch.zeros(len(loss_mask) + 1, dtype=torch.bool)
    starts[offsets] = True  # a reply never goes on in the next sequence
    first = loss_mask & (starts[:-1] | ~F.pad(loss_mask[:-1], (1, 0)))
    last = loss_mask & (starts[1:] | ~F.pad(loss_mask[1:], (0, 1)))
    return first.nonzero().squeeze(1), last.nonzero().squeeze(1)


def _of_piece(
    piece: Tokens, max_length: int, ends: Tensor
) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Numbers to add up, and numbers [...] whose distribution is wanted."""
    lengths, mask = piece.lengths, piece.loss_mask
    supervised = F.pad(mask.cumsum(0), (1, 0))[piece.offsets].diff()  # [S]
    first, last = reply_spans(mask, piece.offsets)
    sequence = torch.searchsorted(piece.offsets, first, right=True) - 1  # [R]
    ended = torch.isin(piece.input_ids[last], ends)  # [R]
    at_end = last + 1 == piece.offsets[sequence + 1]
    cut = at_end & (lengths[sequence] == max_length) & ~ended
    counts = {
        "sequences": len(lengths),
        "tokens": len(mask),
        "supervised": int(mask.sum()),
        "pairs": int(supervised_counts(mask, piece.offsets).sum()),
        "at_max_length": int((lengths == max_length).sum()),
        "replies": len(first),
        "cut_replies": int(cut.sum()),
        "ended_replies": int(ended.sum()),
    }
    values = {
        "lengths": lengths,
        "permille": (supervised * 1000 / lengths).round().long(),
        "replies_each": torch.bincount(sequence, minlength=len(lengths)),
        "reply_lengths": last - first + 1,
        "supervised_ids": piece.input_ids[mask],
    }
    return counts, values


def _digests(piece: Tokens) -> Iterator[int]:
    ids, bounds = piece.input_ids.numpy(), piece.offsets.tolist()
    for begin, end in pairwise(bounds):
        digest = hashlib.blake2b(ids[begin:end].tobytes(), digest_size=8).digest()
        yield int.from_bytes(digest, "little")


def _added(histogram: Tensor | None, numbers: Tensor) -> Tensor:
    """How often each number from 0 came up to now."""
    if histogram is None:
        return torch.bincount(numbers)
    counts = torch.bincount(numbers, minlength=len(histogram))
    counts[: len(histogram)] += histogram
    return counts


def _spread(histogram: Tensor) -> Spread:
    up_to = histogram.cumsum(0)
    count = int(up_to[-1])

    def quantile(percent: int) -> int:
        rank = max(-(-count * percent // 100), 1)
        return int(torch.searchsorted(up_to, rank))

    total = int((histogram * torch.arange(len(histogram))).sum())
    return Spread(
        min=quantile(0),
        p5=quantile(5),
        median=quantile(50),
        mean=round(total / count, 1),
        p95=quantile(95),
        max=len(histogram) - 1,
    )


def _scaled(spread: Spread, factor: float) -> Spread:
    return Spread(**{name: round(value * factor, 1) for name, value in vars(spread).items()})


def _doubling(histogram: Tensor) -> list[int]:
    """Sums of the counts of 1, 2, 3-4, 5-8, … up to the largest number there is."""
    sums, low, high = [], 1, 1
    while low < len(histogram):
        sums.append(int(histogram[low : high + 1].sum()))
        low, high = high + 1, high * 2
    return sums


# --- for people --------------------------------------------------------------------------------


def percent(share: float, digits: int = 1) -> str:
    """A share from 0 to 1 in words."""
    return f"{100 * share:.{digits}f} %"


def summary(statistics: Statistics) -> str:
    """The main figures in three lines."""
    s = statistics
    return (
        f"lengths: {s.lengths.min:,} to {s.lengths.max:,} tokens, median {s.lengths.median:,}; "
        f"{percent(s.at_max_length / s.sequences)} of the sequences at max_length\n"
        f"mask: {percent(s.share)} of the tokens supervised; of a sequence, median "
        f"{s.shares.median} %, nine in ten between {s.shares.p5} and {s.shares.p95} %\n"
        f"ends: of {s.replies:,} replies, median {s.reply_lengths.median:,} tokens, {_ended(s)}"
    )


def table(statistics: Statistics) -> str:
    """All figures, as lines for the terminal."""
    s = statistics
    rows = [
        ("sequences", s.sequences, f"{s.distinct:,} of them different"),
        (
            "at max_length",
            s.at_max_length,
            f"{percent(s.at_max_length / s.sequences)} of the sequences",
        ),
        ("tokens", s.tokens, ""),
        ("supervised tokens", s.supervised, f"{percent(s.share)} of the tokens"),
        ("supervised pairs", s.pairs, "what the loss counts: no reply's first token"),
        ("replies", s.replies, f"{s.cut_replies:,} of them cut off by max_length"),
        ("  ended", s.ended_replies, _ended(s)),
        (
            "top token",
            s.top_count,
            f"{s.top_text!r}, {percent(s.top_count / s.supervised)} of replies",
        ),
    ]
    lines = [f"{name:<20}{value:>12,}   {about}".rstrip() for name, value, about in rows]
    spreads = {
        "tokens of a sequence": s.lengths,
        "supervised, %": s.shares,
        "replies of a sequence": s.replies_each,
        "tokens of a reply": s.reply_lengths,
    }
    titles = ("min", "5 %", "median", "mean", "95 %", "max")
    lines += ["", " " * 24 + "".join(f"{title:>9}" for title in titles)]
    for name, spread in spreads.items():
        lines.append(f"{name:<24}" + "".join(f"{value:>9,}" for value in vars(spread).values()))
    return "\n".join([*lines, "", "tokens of a sequence", *_bars(s)])


def _ended(statistics: Statistics) -> str:
    if statistics.cut_replies == statistics.replies:
        return "all of them are cut off by max_length"
    return f"{percent(statistics.ended_share)} of those not cut off have an end-of-turn token"


def _bars(statistics: Statistics) -> Iterator[str]:
    most = max(statistics.histogram)
    low, high = 1, 1
    for count in statistics.histogram:
        if high >= statistics.lengths.min:
            bar = "█" * round(BAR * count / most)
            to = min(high, statistics.max_length)
            share = percent(count / statistics.sequences)
            yield f"{low:>9,} to {to:>7,}{count:>10,}{share:>9}  {bar}".rstrip()
        low, high = high + 1, high * 2
