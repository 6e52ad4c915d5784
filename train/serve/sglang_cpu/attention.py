"""Stand-ins for the CPU kernels of attention.

B requests, S slots of the key and value buffers, R rows and P positions of the table
`req_to_token` [R, P], which says in which slot the keys and values of a request's position lie.
"""

import torch
from torch import Tensor


def decode_attention_cpu(
    query: Tensor,
    key_buffer: Tensor,
    value_buffer: Tensor,
    key_scale: float | None,
    value_scale: float | None,
    output: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    scale: float,
    logit_cap: float,
    is_cross_attention: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """One new token a request: store its key and value, then attend to everything before it.

    query, output: [B, heads, d]
    key, value:    [B, kv_heads, d]
    buffers:       [S, kv_heads, d]
    loc:           [B]  slots of the new tokens
    """
    _refuse(logit_cap=logit_cap, is_cross_attention=is_cross_attention, sinks=sinks)
    if key is not None and value is not None:
        key_buffer[loc] = key.view(-1, *key_buffer.shape[1:]).to(key_buffer.dtype)
        value_buffer[loc] = value.view(-1, *value_buffer.shape[1:]).to(value_buffer.dtype)
    for b, (row, length) in enumerate(
        zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    ):
        slots = req_to_token[row, :length].long()
        everything = torch.ones(1, length, dtype=torch.bool)
        attended = _attention(
            query[b : b + 1], key_buffer[slots], value_buffer[slots], everything, scale=scale
        )
        output[b] = attended[0].to(output.dtype)


def extend_attention_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    key_buffer: Tensor,
    value_buffer: Tensor,
    key_scale: float | None,
    value_scale: float | None,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,
    scale: float,
    logit_cap: float,
    is_cross_attention: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    causal: bool,
) -> None:
    """Several new tokens a request, whose keys and values are stored already.

    query, output: [T, heads, d]
    buffers:       [S, kv_heads, d]
    seq_lens, extend_seq_lens, extend_start_loc: [B]  length, how many are new, their first row
    tree_mask:     [sum of new * new]  which of its request's new tokens each attends to
    """
    _refuse(logit_cap=logit_cap, is_cross_attention=is_cross_attention, sinks=sinks)
    read = 0  # of the tree mask
    for b, (row, length) in enumerate(
        zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    ):
        new, first = int(extend_seq_lens[b]), int(extend_start_loc[b])
        if tree_mask is not None:
            among_new = tree_mask[read : read + new * new].view(new, new).bool()
            read += new * new
        else:
            among_new = torch.ones(new, new, dtype=torch.bool)
            among_new = among_new.tril() if causal else among_new
        prefix = torch.ones(new, length - new, dtype=torch.bool)
        slots = req_to_token[row, :length].long()
        attended = _attention(
            query[first : first + new],
            key_buffer[slots],
            value_buffer[slots],
            torch.cat([prefix, among_new], dim=1),
            scale=scale,
        )
        output[first : first + new] = attended.to(output.dtype)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """Grouped-query attention in float32, one softmax over all.

    query:      [Q, heads, d]
    key, value: [K, kv_heads, d]
    mask:       [Q, K]  True where a query may look
    returns     [Q, heads, d] float32
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(groups, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    probs = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", probs, value)


def _refuse(*, logit_cap: float, is_cross_attention: bool, sinks: Tensor | None) -> None:
    """Options of other model families would change the result: stop, do not ignore them."""
    if logit_cap or is_cross_attention or sinks is not None:
        raise NotImplementedError(
            f"The stand-in for SGLang's attention has no logit_cap ({logit_cap}), cross attention "
            f"({is_cross_attention}) and sinks ({sinks is not None})."
        )
