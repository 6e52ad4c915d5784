"""Stand-ins for the CPU kernels that describe a draft tree and walk through it.

B requests, N nodes of a tree, the root included.
"""

import torch
from torch import Tensor

QLEN_ONLY = 1  # the form of tree mask that SGLang uses on CPUs: draft tokens only, no prefix


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    mode: int,
) -> None:
    """Describe the tree that SGLang chose: who attends to whom, positions, children as lists.

    parent_list:    [B, M]    flat index of the candidate that is beam m's node; -1: the root
    selected_index: [B, N-1]  flat indices of the chosen candidates, ascending; c belongs to beam
                              c // topk
    tree_mask:      [B * N * N]  filled: node i attends to the root, its ancestors and itself
    positions:      [B * N]      filled: sequence length + depth of the node
    retrieve_index, retrieve_next_token, retrieve_next_sibling: [B, N]
                              filled: the node in the batch, its first child and its next sibling,
                              -1 where there is none (as they come)

    A candidate whose parent was not chosen (which a tie may cause) becomes no one's child.
    """
    assert int(mode) == QLEN_ONLY, f"tree mask of mode {mode}; on a CPU SGLang asks for {QLEN_ONLY}"
    num = draft_token_num
    masks, depths = tree_mask.view(-1, num, num), positions.view(-1, num)
    for b, length in enumerate(seq_lens.tolist()):
        parents = _parents(selected_index[b].tolist(), parent_list[b].tolist(), topk)
        retrieve_index[b] = torch.arange(b * num, (b + 1) * num)
        masks[b] = torch.eye(num, dtype=masks.dtype)
        masks[b, :, 0] = True
        depths[b, 0] = length
        for node, parent in enumerate(parents[1:], start=1):
            if parent is None:
                depths[b, node] = length
                continue
            masks[b, node] |= masks[b, parent]
            depths[b, node] = depths[b, parent] + 1
        for node in range(num - 1, 0, -1):  # from behind, so that lists begin with the best child
            if (parent := parents[node]) is not None:
                retrieve_next_sibling[b, node] = retrieve_next_token[b, parent]
                retrieve_next_token[b, parent] = node


def _parents(selected: list[int], beam_nodes: list[int], topk: int) -> list[int | None]:
    """Parents of the nodes; None for the root and for nodes whose parent was not chosen."""
    node_of = {flat: node for node, flat in enumerate(selected, start=1)}
    parents: list[int | None] = [None]
    for flat in selected:
        beam = flat // topk
        parents.append(0 if beam == 0 else node_of.get(beam_nodes[beam]))
    return parents


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk down from the root, to the child that is the target's own next token.

    predicts:         [B * N]     filled at visited nodes: the token that follows
    accept_index:     [B, width]  filled: visited nodes, the root first
    accept_token_num: [B]         filled: how many draft tokens are accepted
    candidates:       [B, N]      tokens of the nodes
    target_predict:   [B * N]     the target's argmax after each node
    """
    wanted = target_predict.flatten()
    for b in range(len(candidates)):
        node = accepted = 0
        while True:
            place = int(retrive_index[b, node])
            accept_index[b, accepted] = place
            predicts[place] = wanted[place].to(predicts.dtype)
            if accepted + 1 == accept_index.shape[1]:
                break
            child = int(retrive_next_token[b, node])
            while child != -1 and candidates[b, child] != wanted[place]:
                child = int(retrive_next_sibling[b, child])
            if child == -1:
                break
            node, accepted = child, accepted + 1
        accept_token_num[b] = accepted
