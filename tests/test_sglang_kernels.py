"""The stand-ins for SGLang's kernels do what SGLang's rules say; none of this needs SGLang."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from train.serve.sglang_cpu.attention import decode_attention_cpu, extend_attention_cpu
from train.serve.sglang_cpu.slots import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
)
from train.serve.sglang_cpu.trees import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

LENGTH = 30  # of the sequence before the tree
# topk 2, two steps: candidates 0 and 1 under the root, 2..5 the children of beams 0 and 1.
TREES = {
    # selected -> parents of nodes 1.. ; -1: an orphan
    (0, 1, 2, 4): [0, 0, 1, 2],
    (0, 2, 3): [0, 1, 1],
    (0, 1, 4, 5): [0, 0, 2, 2],
    (0, 4): [0, -1],
}


def build(selected: tuple[int, ...]) -> dict[str, torch.Tensor]:
    num = len(selected) + 1
    arrays = {
        "tree_mask": torch.zeros(num * num, dtype=torch.bool),
        "positions": torch.zeros(num, dtype=torch.long),
        "retrieve_index": torch.full((1, num), -1),
        "retrieve_next_token": torch.full((1, num), -1),
        "retrieve_next_sibling": torch.full((1, num), -1),
    }
    build_tree_kernel_efficient_cpu(
        torch.tensor([[-1, 0, 1]]),
        torch.tensor([selected]),
        torch.tensor([LENGTH]),
        **arrays,
        topk=2,
        depth=2,
        draft_token_num=num,
        mode=1,
    )
    return arrays


@pytest.mark.parametrize("selected", TREES)
def test_a_node_attends_to_its_ancestors_at_the_position_of_its_depth(selected):
    parents = [None, *TREES[selected]]
    built = build(selected)
    mask = built["tree_mask"].view(len(parents), -1)
    for node, parent in enumerate(parents):
        line = [node]
        while line[-1] > 0 and parents[line[-1]] >= 0:
            line.append(parents[line[-1]])
        assert mask[node].nonzero().flatten().tolist() == sorted({0, *line})
        depth = 0 if parent is None or parent < 0 else len(line) - 1
        assert built["positions"][node] == LENGTH + depth


@pytest.mark.parametrize("selected", TREES)
def test_children_are_listed_from_the_likeliest_and_orphans_not_at_all(selected):
    built = build(selected)
    after, beside = built["retrieve_next_token"][0], built["retrieve_next_sibling"][0]
    for node in range(len(selected) + 1):
        listed, child = [], int(after[node])
        while child != -1:
            listed.append(child)
            child = int(beside[child])
        assert listed == [n for n, p in enumerate(TREES[selected], start=1) if p == node]


def test_the_walk_takes_the_targets_own_tokens_for_all_it_may_say():
    """Brute force over everything that the target could say after each node of one tree."""
    selected, tokens = (0, 1, 2, 4), [9, 5, 6, 7, 5]
    parents, built = [None, *TREES[selected]], build(selected)
    num = len(tokens)
    for said in itertools.product((5, 6, 7), repeat=num):
        node, path = 0, []
        while True:
            children = [c for c in range(1, num) if parents[c] == node and tokens[c] == said[node]]
            if not children:
                break
            node = children[0]
            path.append(node)
        predicts = torch.full((num,), -1)
        accept_index, accepted = torch.full((1, 3), -1), torch.zeros(1, dtype=torch.long)
        verify_tree_greedy_cpu(
            predicts,
            accept_index,
            accepted,
            torch.tensor([tokens]),
            built["retrieve_index"],
            built["retrieve_next_token"],
            built["retrieve_next_sibling"],
            torch.tensor(said),
        )
        assert accepted.item() == len(path)
        assert accept_index[0].tolist() == [0, *path, *[-1] * (2 - len(path))]
        for place in (0, *path):
            assert predicts[place] == said[place]


def test_slots_are_written_and_read_by_position():
    table = torch.zeros(3, 20, dtype=torch.int32)
    rows, start, end = torch.tensor([2, 0]), torch.tensor([4, 1]), torch.tensor([7, 3])
    slots = torch.tensor([11, 12, 13, 21, 22, 99])  # the buffer may be longer
    assign_req_to_token_pool_cpu(rows, table, start, end, slots, 20)
    assert table[2, 4:7].tolist() == [11, 12, 13] and table[0, 1:3].tolist() == [21, 22]
    assert int((table != 0).sum()) == 5
    read = torch.full((6,), -1)
    assign_extend_cache_locs_cpu(rows, table, start, end, read, 20)
    assert read.tolist() == [11, 12, 13, 21, 22, -1]


def test_each_beam_rank_drafts_in_slots_of_its_own():
    table = torch.arange(100, 130, dtype=torch.int32)[None].repeat(2, 1)
    rows, lengths = torch.tensor([1]), torch.tensor([5])
    drafted = torch.zeros(6, dtype=torch.long)
    assign_draft_cache_locs_contiguous_cpu(rows, table, lengths, drafted, 30, 2, 3)
    assert drafted.tolist() == [105, 106, 107, 108, 109, 110]
    seen = build_draft_decode_metadata_cpu(table, rows, lengths, 2, 3, 30)
    assert seen[0, :8].tolist() == [100, 101, 102, 103, 104, 105, 106, 107]
    assert seen[1, :8].tolist() == [100, 101, 102, 103, 104, 108, 109, 110]


def test_keys_of_accepted_tokens_move_although_their_places_overlap():
    keys = torch.arange(12.0).view(6, 2)
    values = keys + 100
    pointers = torch.tensor([keys.data_ptr(), values.data_ptr()])
    copy_all_layer_kv_cache_cpu(
        pointers, torch.tensor([8, 8]), torch.tensor([2, 3]), torch.tensor([3, 5])
    )
    assert keys[2:4].tolist() == [[6, 7], [10, 11]]
    assert values[2:4].tolist() == [[106, 107], [110, 111]]


def test_bonus_tokens_and_slots_of_accepted_nodes():
    bonus = torch.zeros(2, dtype=torch.long)
    fill_bonus_tokens_cpu(torch.tensor([4, 5, 6, 7, 8, 9]), torch.tensor([2, 1]), bonus, 3)
    assert bonus.tolist() == [5, 7]
    slots = torch.full((6,), -1)
    index = torch.tensor([[0, 2, -1], [3, -1, -1]])
    fill_accept_out_cache_loc_cpu(index, torch.tensor([10, 11, 12, 13, 14, 15]), slots)
    assert slots.tolist() == [10, 12, 13, -1, -1, -1]


def attention_case(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    buffers = [torch.randn(40, 2, 8, generator=generator) for _ in range(2)]
    table = torch.randperm(40, generator=generator)[:20].view(1, 20)
    query = torch.randn(5, 4, 8, generator=generator)
    return query, buffers, table


def expected(query, keys, values, mask) -> torch.Tensor:
    """Torch's own attention. query: [Q, heads, d], keys and values: [K, kv_heads, d]."""
    query, keys, values = (x.transpose(0, 1)[None] for x in (query, keys, values))
    found = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    return found[0].transpose(0, 1)


OPTIONS = dict(logit_cap=0.0, is_cross_attention=False, sliding_window=-1, encoder_lens=None)


@pytest.mark.parametrize("tree", [False, True])
def test_new_tokens_attend_to_the_prefix_and_to_those_that_the_mask_allows(tree):
    query, (keys, values), table = attention_case()
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()
    if tree:
        allowed[3, 1] = allowed[4, 2] = False
    output = torch.zeros_like(query)
    extend_attention_cpu(
        query,
        None,
        None,
        output,
        keys,
        values,
        None,
        None,
        table,
        torch.tensor([0]),
        torch.tensor([12]),
        torch.tensor([5]),
        torch.tensor([0]),
        5,
        0.3,
        sinks=None,
        tree_mask=allowed.flatten() if tree else None,
        causal=True,
        **OPTIONS,
    )
    mask = torch.cat([torch.ones(5, 7, dtype=torch.bool), allowed], dim=1)
    slots = table[0, :12]
    assert_close(output, expected(query, keys[slots], values[slots], mask))


def decode(query, buffers, table, **options) -> torch.Tensor:
    output = torch.zeros_like(query)
    new = torch.ones(1, 2, 8)
    decode_attention_cpu(
        query,
        *buffers,
        None,
        None,
        output,
        new,
        2 * new,
        table[0, 11:12],
        None,
        table,
        torch.tensor([0]),
        torch.tensor([12]),
        0.3,
        **{**OPTIONS, "sinks": None, **options},
    )
    return output


def test_a_drafted_token_stores_its_key_and_attends_to_it():
    query, buffers, table = attention_case()
    output = decode(query[:1], buffers, table)
    slots = table[0, :12]
    keys, values = buffers
    assert keys[slots[-1]].eq(1).all() and values[slots[-1]].eq(2).all()
    mask = torch.ones(1, 12, dtype=torch.bool)
    assert_close(output, expected(query[:1], keys[slots], values[slots], mask))


@pytest.mark.parametrize("option", [{"logit_cap": 30.0}, {"is_cross_attention": True}])
def test_what_the_stand_in_for_attention_cannot_do_stops_it(option):
    query, buffers, table = attention_case()
    with pytest.raises(NotImplementedError, match="stand-in"):
        decode(query[:1], buffers, table, **option)
