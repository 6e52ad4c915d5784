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
# Sampling is looked at in every 4th place: it needs the target's whole distribution anew, and in
# every place it would double the time of an estimate, most of which is the output head.
SAMPLING_STRIDE = 4
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
    compared: Tensor  # [D, K] int64  places of the tried where the distributions were compared
    overlap: Tensor  # [D, K] float64  sum of Σ_x min(p(x), q(x)) over those

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
        return (self.overlap.sum(0) / self.compared.sum(0).clamp(min=1)).tolist()

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
        counts = ((p.tried, p.accepted, p.compared, p.overlap) for p in parts)
        joined = (torch.cat(tensors)[order] for tensors in zip(*counts, strict=True))
        return cls([names[i] for i in order], *joined)

    def to_json(self) -> dict:
        return {
            **self.counts.to_json(),
            "interval": self.interval,
            "conversations": len({stem(name) for name in self.names}),
            "sampling_alpha": self.sampling_rates,
        }


@dataclass
class HeldoutDocument:
    """A held-out sequence with what the target would greedily say at its supervised pairs."""

    name: str  # its id in the cache
    features: Tensor  # [T, H]
    input_ids: Tensor  # [T]
    supervised: Tensor  # [T-1] bool
    target_tokens: Tensor  # [T-1]  argmax of logits(f_{j+1}) at supervised pairs j, else -1


@torch.no_grad()
def prepare_document(
    sequence: CachedSequence, target_head: TargetHead, device: torch.device, *, name: str = ""
) -> HeldoutDocument:
    """Move a cached sequence to `device` and find the target's own greedy tokens, once."""
    features = sequence.features.to(device)
    supervised = supervised_pairs(sequence.loss_mask).to(device)
    target_tokens = torch.full_like(supervised, -1, dtype=torch.long)
    target_tokens[supervised] = _argmax_tokens(features[1:][supervised], target_head)
    return HeldoutDocument(name, features, sequence.input_ids.to(device), supervised, target_tokens)


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
    return HeldoutEstimate([], counts, counts, counts, counts.double())


def _document_estimate(
    head: DraftHead, target_head: TargetHead, document: HeldoutDocument, num_steps: int
) -> HeldoutEstimate:
    dtype = head.fc.weight.dtype
    input_ids, supervised = document.input_ids, document.supervised
    tried, num_accepted, compared = torch.zeros(3, num_steps, dtype=torch.long)
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
        drafted = _argmax_tokens(predicted, target_head)
        accepted = drafted == document.target_tokens[starts + n - 1]
        tried[n - 1] = len(starts)
        num_accepted[n - 1] = accepted.sum()
        places = starts[::SAMPLING_STRIDE] + n
        compared[n - 1] = len(places)
        overlap[n - 1] = _overlap(
            predicted[::SAMPLING_STRIDE], document.features[places], target_head
        )
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
    counts = tried[None], num_accepted[None], compared[None]
    return HeldoutEstimate([document.name], *counts, overlap[None])


def _argmax_tokens(features: Tensor, target_head: TargetHead) -> Tensor:
    """The output head's most likely token. features: [N, H] -> [N]."""
    chunks = [target_head.logits(part).argmax(-1) for part in _chunks(features, target_head)]
    return torch.cat(chunks)


def _overlap(predicted: Tensor, features: Tensor, target_head: TargetHead) -> Tensor:
    """Σ_x min(p(x), q(x)) over what target and head say in the same places, summed: float64 [].

    predicted: [N, H]  f̂
    features:  [N, H]  f
    """
    total = torch.zeros((), dtype=torch.float64, device=predicted.device)
    pairs = zip(_chunks(predicted, target_head), _chunks(features, target_head), strict=True)
    for own, real in pairs:
        draft_probs = target_head.logits(own).softmax(-1)  # [R, V]
        target_probs = target_head.logits(real).softmax(-1)
        total += torch.minimum(target_probs, draft_probs).sum(-1).double().sum()
    return total


def _chunks(features: Tensor, target_head: TargetHead) -> Sequence[Tensor]:
    """[N, H] in parts whose logits fit."""
    return features.split(max(1, LOGIT_ELEMENTS // len(target_head.weight)))
