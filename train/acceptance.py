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
from data.target import TargetHead
from train.head import DraftHead, packed_attention

LOGIT_ROWS = 512  # rows of one output head product


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
class HeldoutDocument:
    """A held-out sequence with what the target would greedily say at its supervised pairs."""

    features: Tensor  # [T, H]
    input_ids: Tensor  # [T]
    supervised: Tensor  # [T-1] bool
    target_tokens: Tensor  # [T-1]  argmax of logits(f_{j+1}) at supervised pairs j, else -1


@torch.no_grad()
def prepare_document(
    sequence: CachedSequence, target_head: TargetHead, device: torch.device
) -> HeldoutDocument:
    """Move a cached sequence to `device` and find the target's own greedy tokens, once."""
    features = sequence.features.to(device)
    supervised = supervised_pairs(sequence.loss_mask).to(device)
    target_tokens = torch.full_like(supervised, -1, dtype=torch.long)
    target_tokens[supervised] = _argmax_tokens(features[1:][supervised], target_head)
    return HeldoutDocument(features, sequence.input_ids.to(device), supervised, target_tokens)


@torch.no_grad()
def chain_acceptance(
    head: DraftHead,
    target_head: TargetHead,
    documents: Iterable[HeldoutDocument],
    *,
    num_steps: int,
) -> ChainCounts:
    """Follow greedy chains of `num_steps` draft tokens from every supervised pair.

    A chain goes on as long as its tokens are accepted *and* the cached text is what the target
    itself would have said: past that point the cache cannot tell what the target would answer.
    """
    counts = ChainCounts.zeros(num_steps, target_head.weight.device)
    for document in documents:
        counts += _document_counts(head, target_head, document, num_steps)
    return counts


def _document_counts(
    head: DraftHead, target_head: TargetHead, document: HeldoutDocument, num_steps: int
) -> ChainCounts:
    dtype = head.fc.weight.dtype
    input_ids, target_tokens = document.input_ids, document.target_tokens
    counts = ChainCounts.zeros(num_steps, input_ids.device)

    # Step 1: real pairs everywhere.
    positions = torch.arange(len(input_ids) - 1, device=input_ids.device)
    x = head.fuse(target_head.embed(input_ids[1:]).to(dtype), document.features[:-1].to(dtype))
    query, key, value = head.query_key_value(x, positions)
    attended = packed_attention(query, key, value, [len(positions)])
    starts = document.supervised.nonzero().squeeze(1)  # [M]  the chains still followed
    predicted = head.finish(x[starts], attended[:, starts])  # [M, H]

    own_keys: list[Tensor] = []  # each [kv_heads, M, d]
    own_values: list[Tensor] = []
    for n in range(1, num_steps + 1):
        drafted = _argmax_tokens(predicted, target_head)
        accepted = drafted == target_tokens[starts + n - 1]
        counts.tried[n - 1] = len(starts)
        counts.accepted[n - 1] = accepted.sum()
        if n == num_steps:
            break
        # Follow on where the text says the same and the next pair is supervised too.
        following = (starts + n).clamp(max=len(target_tokens) - 1)
        keep = accepted & (input_ids[starts + n + 1] == drafted)
        keep &= (starts + n < len(target_tokens)) & document.supervised[following]
        starts, drafted, predicted = starts[keep], drafted[keep], predicted[keep]
        own_keys = [k[:, keep] for k in own_keys]
        own_values = [v[:, keep] for v in own_values]

        x = head.fuse(target_head.embed(drafted).to(dtype), predicted)
        query, own_key, own_value = head.query_key_value(x, starts + n)
        own_keys.append(own_key)
        own_values.append(own_value)
        attended = _chain_attention(query, key, value, starts, own_keys, own_values)
        predicted = head.finish(x, attended)
    return counts


def _chain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    own_keys: list[Tensor],
    own_values: list[Tensor],
) -> Tensor:
    """Attention of one later step: real pairs up to the chain's start, and the chain's own steps.

    query:      [heads, M, d]
    key, value: [kv_heads, T, d]      real pairs
    starts:     [M]                   the pair each chain starts from
    own_keys, own_values: steps of [kv_heads, M, d]
    returns     [heads, M, d]
    """
    groups = query.shape[0] // key.shape[0]
    scale = query.shape[-1] ** -0.5
    own_key = torch.stack(own_keys, dim=2).repeat_interleave(groups, dim=0)  # [heads, M, S, d]
    own_value = torch.stack(own_values, dim=2).repeat_interleave(groups, dim=0)
    key = key.repeat_interleave(groups, dim=0)
    value = value.repeat_interleave(groups, dim=0)

    real_scores = query @ key.transpose(1, 2) * scale  # [heads, M, T]
    hidden = torch.arange(key.shape[1], device=key.device) > starts[:, None]  # [M, T]
    real_scores = real_scores.masked_fill(hidden, float("-inf"))
    own_scores = (query[:, :, None] * own_key).sum(-1) * scale  # [heads, M, S]
    weights = torch.cat([real_scores, own_scores], dim=-1).float().softmax(-1).to(query.dtype)
    real, own = weights.split([key.shape[1], len(own_keys)], dim=-1)
    return real @ value + (own[..., None] * own_value).sum(2)


def _argmax_tokens(features: Tensor, target_head: TargetHead) -> Tensor:
    """The output head's most likely token. features: [N, H] -> [N]."""
    chunks = [target_head.logits(rows).argmax(-1) for rows in features.split(LOGIT_ROWS)]
    if not chunks:
        return torch.empty(0, dtype=torch.long, device=features.device)
    return torch.cat(chunks)
