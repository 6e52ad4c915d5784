"""Stand-ins for the CPU kernels that keep the books of slots, and move keys and values.

B requests, S slots of the key and value buffers, R rows and P positions of the table
`req_to_token` [R, P], which says in which slot the keys and values of a request's position lie.
"""

import ctypes

import torch
from torch import Tensor


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor
) -> None:
    """Move the keys and values of accepted tokens together. Real: the copies; not real: the way.

    data_ptrs: [2L]  addresses of the key and value buffers of L layers
    strides:   [2L]  bytes of one slot in each
    tgt_loc:   [n]   slots to write
    src_loc:   [n]   slots to read, all before any is written
    """
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + slot * stride, stride) for slot in src_loc.tolist()]
        for slot, row in zip(tgt_loc.tolist(), rows, strict=True):
            ctypes.memmove(address + slot * stride, row, stride)


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start: Tensor,
    end: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write new slots into the table: positions start..end-1 of each request.

    req_pool_indices, start, end: [B]
    out_cache_loc:                [sum of end - start, or longer]
    """
    counts = (end - start).tolist()
    for row, first, slots in zip(
        req_pool_indices.tolist(), start.tolist(), _parts(out_cache_loc, counts), strict=True
    ):
        req_to_token[row, first : first + len(slots)] = slots.to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start: Tensor,
    end: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """The other way round: read the slots of positions start..end-1 into `out_cache_loc`."""
    counts = (end - start).tolist()
    for row, first, slots in zip(
        req_pool_indices.tolist(), start.tolist(), _parts(out_cache_loc, counts), strict=True
    ):
        slots.copy_(req_to_token[row, first : first + len(slots)])


def _parts(out_cache_loc: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
    return out_cache_loc[: sum(counts)].split(counts)  # the buffer may be longer


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_cols: int,
) -> None:
    """Read the slots in which a round drafts: topk x num_cols positions behind the sequence.

    seq_lens:      [B]
    out_cache_loc: [B * topk * num_cols]
    """
    rows = out_cache_loc.view(len(seq_lens), topk * num_cols)
    for row, length, slots in zip(req_pool_indices.tolist(), seq_lens.tolist(), rows, strict=True):
        slots.copy_(req_to_token[row, length : length + len(slots)])


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> Tensor:
    """Which slots each beam of a draft attends to: the sequence, then the beam rank's own steps.

    Step s of rank k lies at position `seq_len + k * num_steps + s`, whatever the parents of the
    beam's node are: the rank keeps its keys when the beams are sorted anew.

    returns [B * topk, pool_len]
    """
    table = torch.zeros(len(seq_lens) * topk, pool_len, dtype=req_to_token.dtype)
    beams = table.view(len(seq_lens), topk, pool_len)
    for row, length, ranks in zip(req_pool_indices.tolist(), seq_lens.tolist(), beams, strict=True):
        steps = min(num_steps, pool_len - length)
        for rank, slots in enumerate(ranks):
            own = length + rank * num_steps
            slots[:length] = req_to_token[row, :length]
            slots[length : length + steps] = req_to_token[row, own : own + steps]
    return table


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """The last confirmed token of each request.

    accept_tokens: [B * accept_stride]  confirmed tokens, then anything
    accept_lens:   [B]                  how many are confirmed, the bonus token included
    bonus_tokens:  [B]                  filled
    """
    rows = accept_tokens.view(-1, accept_stride)
    bonus_tokens.copy_(rows.gather(1, accept_lens[:, None].long() - 1)[:, 0])


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """The slots of accepted nodes, one after the other.

    accept_index:         [B, width]  nodes of the batch, -1 where there is none
    out_cache_loc:        [B * N]     slot of each node
    accept_out_cache_loc: [B * N]     filled from the front
    """
    nodes = accept_index[accept_index >= 0].long()
    accept_out_cache_loc[: len(nodes)] = out_cache_loc[nodes]


def rotate_input_ids_cpu(*arguments: object) -> None:
    raise NotImplementedError("SGLang asks for it only with more than one draft layer (MTP).")
