"""Where a head starts: at random, at a linear fit, or at a head that exists already."""

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from data.batches import pack
from data.cache.reader import FeatureCache
from data.targets.model import TargetHead
from train.config import TrainConfig
from train.head import DraftHead
from train.serve.import_head import read_head

log = logging.getLogger(__name__)
MAX_PAIRS = 200_000  # that the fit looks at; 2H unknowns a row need no more
PRODUCT_TOKENS = 8192  # of one product: for wide targets adding the result up costs more than it
RIDGE = 1e-3  # of the mean diagonal: keeps rarely seen directions small


def initialise(
    head: DraftHead,
    config: TrainConfig,
    target_head: TargetHead,
    cache: FeatureCache,
    sequences: list[int],
) -> None:
    """Give a new head its start values, the same in every process.

    sequences: indices in the cache that may be looked at

    Raises ValueError or FileNotFoundError if init_from is not a head that fits.
    """
    if config.init_from:
        tensors = read_head(
            config.init_from,
            head.config,
            embed_tokens=target_head.embed_tokens,
            known=cache.fingerprint,
            drop_bias=config.init_drop_bias,
        )
        head.load_state_dict(tensors)
    elif config.head.init == "regression":
        regression_init(head, target_head, cache, sequences, seed=config.seed)


@torch.no_grad()
def regression_init(
    head: DraftHead,
    target_head: TargetHead,
    cache: FeatureCache,
    sequences: list[int],
    *,
    seed: int,
) -> None:
    """Set fc to argmin Σ |fc [e; f] - f_next|² over supervised pairs, and the residuals to zero.

    fc is linear, so the best linear guess of the next feature has a closed form. With the layer's
    two output projections at zero the head starts as exactly that guess, and training spends its
    steps on what a linear map cannot do. Ours, not the papers'.
    """
    weight = head.fc.weight
    outputs, size = weight.shape
    gram = torch.zeros(size, size, dtype=torch.float64, device=weight.device)
    cross = torch.zeros(size, outputs, dtype=torch.float64, device=weight.device)
    seen = 0
    for inputs, wanted in _shuffled_pairs(head, target_head, cache, sequences, seed=seed):
        gram += inputs.T @ inputs
        cross += inputs.T @ wanted
        seen += len(inputs)
        if seen >= MAX_PAIRS:
            break
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    weight.copy_(torch.linalg.solve(gram, cross).T)
    head.layer.self_attn.o_proj.weight.zero_()
    head.layer.mlp.down_proj.weight.zero_()
    log.info("head.init=regression: fc fitted to %d supervised pairs by least squares", seen)


def _shuffled_pairs(
    head: DraftHead,
    target_head: TargetHead,
    cache: FeatureCache,
    sequences: list[int],
    *,
    seed: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """What fc reads and what it should give, at supervised pairs: [N, 2H] and [N, H].

    In float64: embeddings are much smaller than features, and float32 would round their part away.
    """
    device = head.fc.weight.device
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(seed)).tolist()
    group: list[int] = []
    for i, place in enumerate(order):  # a file may have its chats sorted by subject
        group.append(sequences[place])
        if i + 1 < len(order) and int(cache.lengths[group].sum()) < PRODUCT_TOKENS:
            continue
        batch = pack(cache, group).to(device)
        tokens = target_head.embed(batch.next_ids[batch.supervised])
        features = batch.features[batch.supervised]
        yield head.fc_inputs(tokens.double(), features.double()), batch.target_features.double()
        group = []
