"""The papers' training step and estimate as their code writes them: the yardsticks for ours.

Equal to ours in their results. The step: padded batches, the output head on every position twice,
both softmaxes held, top-3 accuracy over the vocabulary. The estimate: each chain by itself, the
head over the whole text before it for each draft token.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.batches import PackedBatch
from data.targets.model import TargetHead
from train.acceptance import ChainCounts
from train.head import DraftHead


def plain_loss(
    head: DraftHead,
    target_head: TargetHead,
    batch: PackedBatch,
    features: Tensor,
    *,
    l1_weight: float,
    ce_weight: float,
) -> Tensor:
    """The sum over supervised positions that `distillation_loss` gives for the same batch.

    features: [T, H]  the batch's input features, with their noise
    """
    lengths = batch.lengths
    next_ids = _pad(batch.next_ids, lengths)  # [B, T]
    inputs = _pad(features, lengths)  # [B, T, H]
    supervised = torch.zeros(len(features), dtype=torch.bool)
    supervised[batch.supervised] = True
    mask = _pad(supervised, lengths)  # [B, T]
    targets = torch.zeros_like(features)
    targets[batch.supervised] = batch.target_features.to(features.dtype)
    targets = _pad(targets, lengths)

    predicted = _padded_forward(head, target_head.embed(next_ids).to(features.dtype), inputs)
    target_probs = target_head.logits(targets).softmax(dim=-1)  # [B, T, V]
    logits = target_head.logits(predicted)
    log_probs = logits.log_softmax(dim=-1)
    cross_entropy = -(target_probs * log_probs).sum(dim=-1)  # [B, T]
    smooth_l1 = F.smooth_l1_loss(predicted, targets, reduction="none").mean(dim=-1)
    top3_accuracy(logits, target_probs, mask)
    return ((l1_weight * smooth_l1 + ce_weight * cross_entropy) * mask).sum()


@torch.no_grad()
def plain_estimate(
    head: DraftHead,
    target_head: TargetHead,
    batch: PackedBatch,
    *,
    num_steps: int,
) -> ChainCounts:
    """The counts that `chain_acceptance` gives for a batch of one document."""
    supervised = {pair: row for row, pair in enumerate(batch.supervised.tolist())}
    tried, accepted = [0] * num_steps, [0] * num_steps
    for start in supervised:
        features, next_ids = batch.features[: start + 1].float(), batch.next_ids[: start + 1]
        for n in range(num_steps):
            out = head(target_head.embed(next_ids).float(), features, [len(next_ids)])[-1:]
            drafted = target_head.logits(out).argmax(dim=-1)
            wanted = batch.target_features[supervised[start + n]][None]
            tried[n] += 1
            if int(drafted) != int(target_head.logits(wanted).argmax(dim=-1)):
                break
            accepted[n] += 1
            pair = start + n + 1
            if pair not in supervised or int(batch.next_ids[pair]) != int(drafted):
                break
            features, next_ids = torch.cat([features, out]), torch.cat([next_ids, drafted])
    return ChainCounts(torch.tensor(tried), torch.tensor(accepted))


def top3_accuracy(logits: Tensor, target_probs: Tensor, mask: Tensor) -> list[float]:
    """Share of masked positions whose target token is among the head's 1, 2, 3 best."""
    found = logits.topk(3, dim=-1).indices == target_probs.argmax(dim=-1, keepdim=True)
    return [found[..., :k].any(-1)[mask].float().mean().item() for k in (1, 2, 3)]


def _pad(rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """[T, ...] packed -> [B, longest, ...] padded with zeros."""
    return pad_sequence(list(rows.split(list(lengths))), batch_first=True)


def _padded_forward(head: DraftHead, embeddings: Tensor, features: Tensor) -> Tensor:
    """The head over padded documents, [B, T, H], with a dense causal mask."""
    x = head.fuse(embeddings, features)
    steps = x.shape[1]
    positions = torch.arange(steps, device=x.device).expand(len(x), steps)
    query, key, value = head.query_key_value(x, positions)  # [B, heads, T, d]
    groups = query.shape[1] // key.shape[1]
    causal = torch.ones(steps, steps, dtype=torch.bool, device=x.device).tril()
    attended = F.scaled_dot_product_attention(
        query,
        key.repeat_interleave(groups, dim=1),
        value.repeat_interleave(groups, dim=1),
        attn_mask=causal,
    )
    return head.finish(x, attended)
