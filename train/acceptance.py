"""Acceptance of a greedy draft chain, estimated from cached features without generating.

All positions are drafted at once: step n of the chain that starts at pair j attends to the real
pairs 0..j of its document and to its own steps 2..n, exactly what one-by-one drafting would see.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from data.batches import PackedBatch
from data.chats.split import stem
from data.targets.model import TargetHead
from train.fit.unroll import chain_attention, chain_rows, document_of
from train.head import DraftHead, packed_attention

LOGIT_ELEMENTS = 2**25  # of one output head product: 128 MB in float32
# Sampling is looked at in every 8th place: it needs the target's whole distribution anew, and in
# every place it would double the time of an estimate, most of which is the output head.
SAMPLING_STRIDE = 8
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


def length_interval(
    tried: Tensor, accepted: Tensor, clusters: Sequence[str]
) -> tuple[float, float] | None:
    """The 95 % confidence interval of τ; None from fewer than two clusters.

    tried, accepted: [D, K]  counts of D documents or answers
    clusters:        which of them resemble each other: whole clusters are drawn with replacement

    Seeded, so the same counts have the same interval.
    """
    names = sorted(set(clusters))
    if len(names) < 2:
        return None
    place = {name: i for i, name in enumerate(names)}
    cluster = torch.tensor([place[name] for name in clusters])
    draws = torch.randint(
        len(names), (RESAMPLES, len(names)), generator=torch.Generator().manual_seed(0)
    )
    times = torch.zeros(draws.shape, dtype=torch.float64)
    times.scatter_add_(1, draws, torch.ones_like(times))
    times = times[:, cluster]  # [resamples, D]  how often each was drawn
    rates = (times @ accepted.double()) / (times @ tried.double()).clamp(min=1)
    lengths = 1 + rates.cumprod(dim=1).sum(dim=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = lengths.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


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

        Conversations, not positions, are drawn: the parts and replies of one chat resemble each
        other.
        """
        return length_interval(self.tried, self.accepted, [stem(name) for name in self.names])

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
class HeldoutBatch:
    """Held-out documents with what the target would greedily say at their supervised pairs."""

    names: list[str]  # the documents' ids in the cache
    packed: PackedBatch  # on the device
    target_tokens: Tensor  # [N]  argmax of logits(f_{j+1}) at supervised pairs j


@torch.no_grad()
def prepare_batch(
    packed: PackedBatch, names: Sequence[str], target_head: TargetHead
) -> HeldoutBatch:
    """Find the target's own greedy tokens, once for all estimates."""
    return HeldoutBatch(list(names), packed, _argmax_tokens(packed.target_features, target_head))


@torch.no_grad()
def chain_acceptance(
    head: DraftHead,
    target_head: TargetHead,
    batches: Iterable[HeldoutBatch],
    *,
    num_steps: int,
    banned: Tensor | None = None,
) -> HeldoutEstimate:
    """Follow greedy chains of `num_steps` draft tokens from every supervised pair.

    A chain goes on as long as its tokens are accepted *and* the cached text is what the target
    itself would have said: past that point the cache cannot tell what the target would answer.

    banned: [V] bool, tokens that the head may not draft (SGLang's token map)
    """
    parts = [_batch_estimate(head, target_head, batch, num_steps, banned) for batch in batches]
    counts = torch.zeros(0, num_steps, dtype=torch.long)
    nothing = HeldoutEstimate([], counts, counts, counts, counts.double())
    return HeldoutEstimate.joined([nothing, *parts])


def _batch_estimate(
    head: DraftHead,
    target_head: TargetHead,
    batch: HeldoutBatch,
    num_steps: int,
    banned: Tensor | None,
) -> HeldoutEstimate:
    dtype = head.fc.weight.dtype
    packed, lengths = batch.packed, batch.packed.lengths
    document = document_of(packed.supervised, lengths).cpu()  # [N]
    alive = chain_rows(packed.supervised, lengths, num_steps=num_steps)

    # Step 1: real pairs everywhere.
    device = packed.next_ids.device
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    x = head.fuse(target_head.embed(packed.next_ids).to(dtype), packed.features.to(dtype))
    query, key, value = head.query_key_value(x, positions)
    attended = packed_attention(query, key, value, lengths)
    chains = alive[0]  # [M]  still followed, as rows of the N
    starts = packed.supervised
    predicted = head.finish(x[starts], attended[:, starts])  # [M, H]

    def per_document(rows: Tensor, values: Tensor | None = None) -> Tensor:
        # On the CPU, where sums have one order.
        values = None if values is None else values.double().cpu()
        return torch.bincount(document[rows.cpu()], values, minlength=len(lengths))

    tried, num_accepted, compared, overlap = [], [], [], []  # K of [D]
    own: list[tuple[Tensor, Tensor]] = []  # keys and values of later steps, [kv_heads, M, d] each
    for n in range(num_steps):
        places = chains[::SAMPLING_STRIDE]
        features = packed.target_features[places + n]
        drafted, overlaps = _draft(predicted, features, target_head, banned)
        accepted = drafted == batch.target_tokens[chains + n]
        tried.append(per_document(chains))
        num_accepted.append(per_document(chains[accepted]))
        compared.append(per_document(places))
        overlap.append(per_document(places, overlaps))
        if n + 1 == num_steps:
            break
        # Follow on where the next pair is of the same reply and the text says the same there.
        keep = accepted & torch.isin(chains, alive[n + 1])
        chains, drafted, predicted = chains[keep], drafted[keep], predicted[keep]
        same = packed.next_ids[packed.supervised[chains] + n + 1] == drafted
        chains, drafted, predicted = chains[same], drafted[same], predicted[same]
        own = [(k[:, keep][:, same], v[:, keep][:, same]) for k, v in own]

        starts = packed.supervised[chains]
        x = head.fuse(target_head.embed(drafted).to(dtype), predicted)
        query, own_key, own_value = head.query_key_value(x, positions[starts] + n + 1)
        own.append((own_key, own_value))
        attended = chain_attention(query, key, value, starts, own, lengths)
        predicted = head.finish(x, attended)
    counts = (torch.stack(steps, dim=1) for steps in (tried, num_accepted, compared, overlap))
    return HeldoutEstimate(batch.names, *counts)


def _argmax_tokens(features: Tensor, target_head: TargetHead) -> Tensor:
    """The output head's most likely token. features: [N, H] -> [N]."""
    rows = _rows(target_head)
    return torch.cat([target_head.logits(part).argmax(-1) for part in features.split(rows)])


def _draft(
    predicted: Tensor, features: Tensor, target_head: TargetHead, banned: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What the head says, and how much of it the target says too.

    predicted: [N, H]    f̂
    features:  [N/8, H]  f in every 8th place
    banned:    [V]       tokens that are never drafted
    returns    [N]       the head's most likely tokens
               [N/8]     Σ_x min(p(x), q(x))
    """
    rows = _rows(target_head)
    tokens, overlaps = [], []
    parts = zip(predicted.split(rows), features.split(rows // SAMPLING_STRIDE), strict=True)
    for own, real in parts:
        logits = target_head.logits(own)  # [R, V]
        if banned is not None:
            logits = logits.masked_fill_(banned, float("-inf"))
        tokens.append(logits.argmax(-1))
        draft_probs = logits[::SAMPLING_STRIDE].softmax(-1)
        target_probs = target_head.logits(real).softmax(-1)
        overlaps.append(torch.minimum(target_probs, draft_probs).sum(-1))
    return torch.cat(tokens), torch.cat(overlaps)


def _rows(target_head: TargetHead) -> int:
    """Rows of one product: a multiple of the stride, so that parts do not shift its places."""
    fitting = LOGIT_ELEMENTS // len(target_head.weight)
    return max(1, fitting // SAMPLING_STRIDE) * SAMPLING_STRIDE
