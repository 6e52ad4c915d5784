"""Acceptance of a greedy draft chain, estimated from cached features without generating.

All positions of a document are drafted at once: step n of the chain that starts at pair j attends
to the real pairs 0..j and to its own steps 2..n, exactly what one-by-one drafting would see.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from data.cache import CachedSequence, supervised_pairs
from data.split import stem
from data.target import TargetHead
from train.head import DraftHead, packed_attention
from train.unroll import chain_attention

LOGIT_ELEMENTS = 2**25  # of one output head product: 128 MB in float32
RESAMPLES = 1000
CONFIDENCE = 0.95


@dataclass
class ChainCounts:
    """How often draft token n was tried and accepted, n = 1..K."""

    tried: Tensor  # [K] int64
    accepted: Tensor  # [K] int64

    @property
    def rates(self) -> list[float]:
        """α_n: share of tried draft tokens n that were accepted, given that 1..n-1 were."""
        return (self.accepted.double() / self.tried.clamp(min=1)).tolist()

    @property
    def length(self) -> float:
        """τ = 1 + Σ_n Π_{i<=n} α_i: tokens a target forward yields, bonus token included."""
        return 1.0 + sum(accumulate(self.rates, mul))

    def __add__(self, other: "ChainCounts") -> "ChainCounts":
        return ChainCounts(self.tried + other.tried, self.accepted + other.accepted)

    @classmethod
    def of_totals(cls, rounds: int, accepted: Sequence[int]) -> "ChainCounts":
        """From the rounds that there were, and those that accepted draft token n, n = 1..K."""
        return cls(torch.tensor([rounds, *accepted[:-1]]), torch.tensor(list(accepted)))

    @classmethod
    def of_rounds(cls, accepted: Sequence[int], *, num_steps: int) -> "ChainCounts":
        """From how many draft tokens each round accepted."""
        per_step = [sum(count >= n for count in accepted) for n in range(1, num_steps + 1)]
        return cls.of_totals(len(accepted), per_step)

    @classmethod
    def zeros(cls, num_steps: int, device: torch.device | str = "cpu") -> "ChainCounts":
        zeros = torch.zeros(num_steps, dtype=torch.long, device=device)
        return cls(zeros, zeros.clone())

    def to_json(self) -> dict:
        return {
            "acceptance_length": self.length,
            "alpha": self.rates,
            "tried": self.tried.tolist(),
            "accepted": self.accepted.tolist(),
        }


@dataclass
class HeldoutEstimate:
    """Acceptance on held-out documents, counted apart: chats differ, and positions of one do not.

    `overlap` is for sampling: a token drafted with probability q(x) where the target gives p(x) is
    accepted with probability Σ_x min(p(x), q(x)) (SpecInfer, EAGLE), here at temperature 1, in the
    places that the greedy chain comes to.
    """

    names: list[str]  # D ids of cached sequences
    tried: Tensor  # [D, K] int64
    accepted: Tensor  # [D, K] int64
    overlap: Tensor  # [D, K] float64  sum of Σ_x min(p(x), q(x)) over the tried

    @property
    def counts(self) -> ChainCounts:
        return ChainCounts(self.tried.sum(0), self.accepted.sum(0))

    @property
    def length(self) -> float:
        """τ over all documents."""
        return self.counts.length

    @property
    def sampling_rates(self) -> list[float]:
        """Mean Σ_x min(p(x), q(x)) at each step."""
        return (self.overlap.sum(0) / self.tried.sum(0).clamp(min=1)).tolist()

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of τ; None from fewer than two conversations.

        Conversations, not positions, are drawn with replacement: the parts and replies of one chat
        resemble each other. Seeded, so the same counts have the same interval.
        """
        conversations = sorted({stem(name) for name in self.names})
        if len(conversations) < 2:
            return None
        place = {name: i for i, name in enumerate(conversations)}
        of_document = torch.tensor([place[stem(name)] for name in self.names])
        draws = torch.randint(
            len(conversations),
            (RESAMPLES, len(conversations)),
            generator=torch.Generator().manual_seed(0),
        )
        times = torch.zeros(draws.shape, dtype=torch.float64)
        times.scatter_add_(1, draws, torch.ones_like(times))
        times = times[:, of_document]  # [resamples, D]  how often each document was drawn
        rates = (times @ self.accepted.double()) / (times @ self.tried.double()).clamp(min=1)
        lengths = 1 + rates.cumprod(dim=1).sum(dim=1)
        tail = (1 - CONFIDENCE) / 2
        low, high = lengths.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
        return low, high

    def __str__(self) -> str:
        """As logs have it: 1.389 [1.352, 1.428]."""
        between = self.interval
        return f"{self.length:.3f}" + (f" [{between[0]:.3f}, {between[1]:.3f}]" if between else "")

    @classmethod
    def joined(cls, parts: Sequence["HeldoutEstimate"]) -> "HeldoutEstimate":
        """All documents in the order of their names, however processes had shared them out."""
        names = [name for part in parts for name in part.names]
        order = sorted(range(len(names)), key=names.__getitem__)
        tried, accepted, overlap = (
            torch.cat(tensors)[order]
            for tensors in zip(*((p.tried, p.accepted, p.overlap) for p in parts), strict=True)
        )
        return cls([names[i] for i in order], tried, accepted, overlap)

    def to_json(self) -> dict:
        return {
            **self.counts.to_json(),
            "interval": self.interval,
            "conversations": len({stem(name) for name in self.names}),
            "sampling_alpha": self.sampling_rates,
        }


@dataclass
class HeldoutDocument:
    """A held-out sequence, on the device."""

    name: str  # its id in the cache
    features: Tensor  # [T, H]
    input_ids: Tensor  # [T]
    supervised: Tensor  # [T-1] bool


def prepare_document(
    sequence: CachedSequence, device: torch.device, *, name: str = ""
) -> HeldoutDocument:
    """Move a cached sequence to `device`, once for all estimates."""
    supervised = supervised_pairs(sequence.loss_mask).to(device)
    input_ids = sequence.input_ids.to(device)
    return HeldoutDocument(name, sequence.features.to(device), input_ids, supervised)


@torch.no_grad()
def chain_acceptance(
    head: DraftHead,
    target_head: TargetHead,
    documents: Iterable[HeldoutDocument],
    *,
    num_steps: int,
) -> HeldoutEstimate:
    """Follow greedy chains of `num_steps` draft tokens from every supervised pair.

    A chain goes on as long as its tokens are accepted *and* the cached text is what the target
    itself would have said: past that point the cache cannot tell what the target would answer.
    """
    parts = [_document_estimate(head, target_head, d, num_steps) for d in documents]
    return HeldoutEstimate.joined([_nothing(num_steps), *parts])


def _nothing(num_steps: int) -> HeldoutEstimate:
    counts = torch.zeros(0, num_steps, dtype=torch.long)
    return HeldoutEstimate([], counts, counts, counts.double())


def _document_estimate(
    head: DraftHead, target_head: TargetHead, document: HeldoutDocument, num_steps: int
) -> HeldoutEstimate:
    dtype = head.fc.weight.dtype
    input_ids, supervised = document.input_ids, document.supervised
    tried, num_accepted = (torch.zeros(num_steps, dtype=torch.long) for _ in range(2))
    overlap = torch.zeros(num_steps, dtype=torch.float64)

    # Step 1: real pairs everywhere.
    lengths = [len(supervised)]
    positions = torch.arange(len(supervised), device=input_ids.device)
    x = head.fuse(target_head.embed(input_ids[1:]).to(dtype), document.features[:-1].to(dtype))
    query, key, value = head.query_key_value(x, positions)
    attended = packed_attention(query, key, value, lengths)
    starts = supervised.nonzero().squeeze(1)  # [M]  the chains still followed
    predicted = head.finish(x[starts], attended[:, starts])  # [M, H]

    own: list[tuple[Tensor, Tensor]] = []  # keys and values of later steps, [kv_heads, M, d] each
    for n in range(1, num_steps + 1):
        drafted, accepted, overlaps = _compare(
            predicted, document.features[starts + n], target_head
        )
        tried[n - 1] = len(starts)
        num_accepted[n - 1] = accepted.sum()
        overlap[n - 1] = overlaps.double().sum()
        if n == num_steps:
            break
        # Follow on where the text says the same and the next pair is supervised too.
        following = (starts + n).clamp(max=len(supervised) - 1)
        keep = accepted & (input_ids[starts + n + 1] == drafted)
        keep &= (starts + n < len(supervised)) & supervised[following]
        starts, drafted, predicted = starts[keep], drafted[keep], predicted[keep]
        own = [(k[:, keep], v[:, keep]) for k, v in own]

        x = head.fuse(target_head.embed(drafted).to(dtype), predicted)
        query, own_key, own_value = head.query_key_value(x, starts + n)
        own.append((own_key, own_value))
        attended = chain_attention(query, key, value, starts, own, lengths)
        predicted = head.finish(x, attended)
    return HeldoutEstimate([document.name], tried[None], num_accepted[None], overlap[None])


def _compare(
    predicted: Tensor, features: Tensor, target_head: TargetHead
) -> tuple[Tensor, Tensor, Tensor]:
    """What head and target say in the same N places.

    predicted: [N, H]  f̂
    features:  [N, H]  f
    returns    [N]     the head's most likely token
               [N]     bool: it is the target's
               [N]     Σ_x min(p(x), q(x))
    """
    rows = max(1, LOGIT_ELEMENTS // len(target_head.weight))
    drafted, accepted, overlaps = [], [], []
    for own, real in zip(predicted.split(rows), features.split(rows), strict=True):
        draft_logits, target_logits = target_head.logits(own), target_head.logits(real)  # [R, V]
        drafted.append(draft_logits.argmax(-1))
        accepted.append(drafted[-1] == target_logits.argmax(-1))
        target_probs, draft_probs = target_logits.softmax(-1), draft_logits.softmax(-1)
        overlaps.append(torch.minimum(target_probs, draft_probs).sum(-1))
    return torch.cat(drafted), torch.cat(accepted), torch.cat(overlaps)
