"""A start for the head that already predicts: least squares on the cache.

`fc` is linear in `[e(t_{j+1}); f_j]`, so the best linear guess of `f_{j+1}` has a closed form. With
the layer's two output projections at zero the head starts as exactly that guess, and training
spends its steps on what a linear map cannot do. Ours, not the papers'.
"""

import logging

import torch

from data.batches import pack
from data.cache import FeatureCache
from data.target import TargetHead
from train.head import DraftHead

log = logging.getLogger(__name__)
MAX_TOKENS = 200_000  # pairs that the fit looks at; 2H unknowns a row need no more
RIDGE = 1e-3  # of the mean diagonal: keeps rarely seen directions small


@torch.no_grad()
def regression_init(
    head: DraftHead, target_head: TargetHead, cache: FeatureCache, sequences: list[int]
) -> None:
    """Set fc to argmin Σ |fc [e; f] - f_next|² over supervised pairs, and the residuals to zero."""
    weight = head.fc.weight
    size = weight.shape[1]
    gram = torch.zeros(size, size, dtype=torch.float64, device=weight.device)
    cross = torch.zeros(size, weight.shape[0], dtype=torch.float64, device=weight.device)
    seen = 0
    for index in sequences:
        batch = pack(cache, [index]).to(weight.device)
        tokens = target_head.embed(batch.next_ids[batch.supervised])
        inputs = torch.cat([tokens.float(), batch.features[batch.supervised].float()], dim=-1)
        gram += (inputs.T @ inputs).double()
        cross += (inputs.T @ batch.target_features.float()).double()
        seen += len(inputs)
        if seen >= MAX_TOKENS:
            break
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    weight.copy_(torch.linalg.solve(gram, cross).T)
    head.layer.self_attn.o_proj.weight.zero_()
    head.layer.mlp.down_proj.weight.zero_()
    log.info("head.init=regression: fc fitted to %d supervised pairs by least squares", seen)
