"""Training on the head's own features (HASS, arXiv 2408.15766, section 3.2): `unroll=K`.

When drafting, only the first step reads the target's features; the later ones read what the head
itself has predicted. A head trained on the first step alone has never seen such inputs. Here every
supervised pair s starts a chain of K steps, all at once. Step n of chain s stands at pair s+n-1 and

    reads    the text's own token t_{s+n} and the head's feature f̂_{s+n-1} of step n-1
    attends  to the real pairs 0 ... s and to the chain's own steps 2 ... n
    answers  f̂_{s+n}, which is compared with f_{s+n}

which is what drafting sees, as long as its tokens are the text's. Step 1 is the ordinary forward.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def chain_rows(supervised: Tensor, lengths: Sequence[int], *, num_steps: int) -> list[Tensor]:
    """Which chains count at each step: those that have not left their reply.

    supervised: [N]  ascending pairs of packed documents; chain m starts from supervised[m]
    lengths:    pairs of each document
    returns     for n = 0 ... num_steps-1 the chains [N_n] that count at step n+1; the target of
                chain m there is that of supervised pair m + n
    """
    document = document_of(supervised, lengths)
    rows = []
    for n in range(num_steps):
        count = max(len(supervised) - n, 0)
        # Replies do not touch, so n supervised pairs in a row are of one.
        whole = supervised[n:] - supervised[:count] == n
        whole &= document[n:] == document[:count]
        rows.append(whole.nonzero().squeeze(1))
    return rows


def document_of(pairs: Tensor, lengths: Sequence[int]) -> Tensor:
    """Which of the packed documents each pair belongs to: [N] -> [N]."""
    return torch.bucketize(pairs, _bounds(pairs, lengths), right=True) - 1


def chain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
    lengths: Sequence[int],
) -> Tensor:
    """Attention of one later step: real pairs up to the chain's start, and the chain's own steps.

    query:      [heads, M, d]
    key, value: [kv_heads, T, d]  real pairs of packed documents
    starts:     [M]               ascending pairs that the chains start from
    own:        key and value, [kv_heads, M, d] each, of each later step so far
    lengths:    pairs of each document, summing to T
    returns     [heads, M, d]
    """
    bounds = _bounds(starts, lengths)
    counts = torch.searchsorted(starts, bounds).diff().tolist()  # chains of each document
    groups = query.shape[0] // key.shape[0]
    own_keys = [k.split(counts, dim=1) for k, _ in own]
    own_values = [v.split(counts, dim=1) for _, v in own]
    parts = []
    for i, (q, k, v, start) in enumerate(
        zip(
            query.split(counts, dim=1),
            key.split(list(lengths), dim=1),
            value.split(list(lengths), dim=1),
            (starts - bounds[:-1].repeat_interleave(bounds.new_tensor(counts))).split(counts),
            strict=True,
        )
    ):
        real = torch.arange(k.shape[1], device=k.device) <= start[:, None]  # [M, T]
        itself = torch.eye(len(start), dtype=torch.bool, device=k.device)  # of another chain: none
        mask = torch.cat([real, *(itself for _ in own)], dim=1)
        k = torch.cat([k, *(keys[i] for keys in own_keys)], dim=1).repeat_interleave(groups, dim=0)
        v = torch.cat([v, *(vals[i] for vals in own_values)], dim=1).repeat_interleave(groups, 0)
        parts.append(F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0])
    return torch.cat(parts, dim=1)


def _bounds(like: Tensor, lengths: Sequence[int]) -> Tensor:
    """Where each document begins, and where the last one ends: [documents + 1]."""
    return torch.tensor([0, *lengths], device=like.device).cumsum(0)
