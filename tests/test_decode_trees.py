"""Shapes of draft trees: what is kept, and how nodes hang together."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from train.decode import Drafting, best_shape
from train.decode.dynamic_tree import grow, rerank
from train.decode.tree import Tree

# The children of a node that is named by its path of tokens: confidences descending, and tokens.
Children = Callable[[tuple[int, ...]], tuple[list[float], list[int]]]
SIZES = [(1, 4, 3), (2, 3, 8), (3, 1, 4), (3, 3, 9), (4, 4, 16), (5, 4, 8), (5, 2, 19)]


def made_up(seed: int, *, topk: int, levels: int | None) -> Children:
    """levels: confidences are multiples of 1/levels, 0 and 1 among them; None: no ties."""

    def children(path: tuple[int, ...]) -> tuple[list[float], list[int]]:
        rng = random.Random(f"{seed} {path}")
        confidences = [
            rng.randint(0, levels) / levels if levels else rng.random() for _ in range(topk)
        ]
        tokens = rng.sample(range(1000), topk)
        return sorted(confidences, reverse=True), tokens

    return children


def ours(children: Children, *, num_steps: int, topk: int, num_draft_tokens: int) -> Tree:
    beam: list[tuple[int, ...]] = [()]

    def expand(depth: int, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal beam
        beam = [(*beam[p], t) for p, t in zip(parents[0].tolist(), tokens[0].tolist(), strict=True)]
        assert all(len(path) == depth for path in beam)
        confidences, found = zip(*map(children, beam), strict=True)
        return torch.tensor([found]), torch.tensor([confidences])

    confidences, tokens = children(())
    candidates = grow(
        torch.tensor([tokens]), torch.tensor([confidences]), expand, num_steps=num_steps
    )
    return rerank(candidates, torch.tensor([-7]), num_draft_tokens=num_draft_tokens)


def best_first(values: list[np.float32], count: int) -> list[int]:
    """Places of the highest values, in SGLang left to torch.topk; here the first of equal ones."""
    return sorted(range(len(values)), key=lambda place: (-values[place], place))[:count]


def sglang(
    children: Children, *, num_steps: int, topk: int, num_draft_tokens: int
) -> tuple[list[int], list[int]]:
    """Tokens and parents of the nodes by SGLang's rules, one number after the other."""
    k = topk
    confidences, tokens = children(())
    scores = [np.float32(c) for c in confidences]  # of all candidates, by flat index
    all_tokens = list(tokens)
    par = [-1, *range(k)]
    beam_paths, beam_scores = [(token,) for token in tokens], list(scores)
    for i in range(1, num_steps):
        layer_scores, layer_tokens, layer_paths = [], [], []
        for r in range(k):
            q, u = children(beam_paths[r])
            for c in range(k):
                layer_scores.append(beam_scores[r] * np.float32(q[c]))
                layer_tokens.append(u[c])
                layer_paths.append((*beam_paths[r], u[c]))
        m = best_first(layer_scores, k)
        beam_paths = [layer_paths[j] for j in m]
        beam_scores = [layer_scores[j] for j in m]
        if i + 1 < num_steps:
            par += [k + (i - 1) * k * k + j for j in m]
        scores += layer_scores
        all_tokens += layer_tokens
    sel = sorted(best_first(scores, num_draft_tokens - 1))
    parents = []
    for a in sel:
        t = a // k
        parents.append(0 if t == 0 else 1 + sel.index(par[t]))
    return [all_tokens[a] for a in sel], parents


@pytest.mark.parametrize("levels", [None, 4, 1], ids=["no ties", "ties", "zeros and ones"])
@pytest.mark.parametrize(("num_steps", "topk", "num_draft_tokens"), SIZES)
def test_for_the_same_scores_the_tree_is_sglangs(num_steps, topk, num_draft_tokens, levels):
    size = {"num_steps": num_steps, "topk": topk, "num_draft_tokens": num_draft_tokens}
    for seed in range(30):
        children = made_up(seed, topk=topk, levels=levels)
        tree, (tokens, parents) = ours(children, **size), sglang(children, **size)
        assert tree.tokens[0].tolist() == [-7, *tokens]
        assert tree.parents[0].tolist() == [0, *parents]


def test_a_kept_node_keeps_its_parent_where_everything_ties():
    """With confidences of 1 and 0 SGLang may keep a child of such a pair without its parent."""
    size = {"num_steps": 4, "topk": 4, "num_draft_tokens": 16}
    sure = [1.0, 0.0, 0.0, 0.0]
    tree = ours(lambda path: (sure, [len(path) * 10 + c for c in range(4)]), **size)
    depths, parents = tree.depths[0].tolist(), tree.parents[0].tolist()
    assert [depths[p] + 1 for p in parents[1:]] == depths[1:]
    # The sure path whole; of the worthless nodes the shallower ones.
    assert tree.tokens[0].tolist()[1:5] == [0, 1, 2, 3]
    assert sorted(depths[1:])[:4] == [1] * 4 and max(depths) == 4


@pytest.mark.parametrize("levels", [None, 4])
def test_depths_ranks_and_confidences_are_those_of_the_nodes(levels):
    size = {"num_steps": 4, "topk": 3, "num_draft_tokens": 14}
    for seed in range(10):
        children = made_up(seed, topk=3, levels=levels)
        tree = ours(children, **size)
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, 14):
            parent = int(tree.parents[0, node])
            confidences, tokens = children(paths[parent])
            rank = int(tree.ranks[0, node])
            assert tokens[rank] == tree.tokens[0, node]
            assert np.float32(confidences[rank]) == tree.confidences[0, node]
            assert tree.depths[0, node] == len(paths[parent]) + 1
            paths.append((*paths[parent], tokens[rank]))


def test_the_trees_of_a_batch_are_those_of_each_alone():
    generator = torch.Generator().manual_seed(0)
    size = {"num_steps": 3, "batch": 4, "k": 3}
    first = torch.rand(size["batch"], size["k"], generator=generator).sort(descending=True)
    table = torch.rand(2, size["batch"], size["k"], size["k"], generator=generator)
    table = table.sort(descending=True).values
    tokens = torch.arange(9).view(3, 3)

    def trees(rows: list[int]) -> Tree:
        def expand(depth: int, above: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
            return tokens.expand(len(rows), -1, -1) + 10 * depth, table[depth - 1, rows]

        candidates = grow(tokens[0].expand(len(rows), -1), first.values[rows], expand, num_steps=3)
        return rerank(candidates, torch.zeros(len(rows), dtype=torch.long), num_draft_tokens=8)

    together = trees([0, 1, 2, 3])
    for row in range(4):
        alone = trees([row])
        for part in ("tokens", "parents", "depths", "ranks", "confidences"):
            assert torch.equal(getattr(together, part)[row], getattr(alone, part)[0])


def hand_made() -> Tree:
    """0 - 1 - 3 - 5, 0 - 1 - 4, 0 - 2"""
    return Tree(
        tokens=torch.tensor([[9, 1, 2, 3, 4, 5]]),
        parents=torch.tensor([[0, 0, 0, 1, 1, 3]]),
        depths=torch.tensor([[0, 1, 1, 2, 2, 3]]),
        ranks=torch.tensor([[0, 0, 1, 0, 1, 0]]),
        confidences=torch.ones(1, 6),
        num_steps=3,
    )


def test_a_node_sees_itself_and_its_ancestors():
    seen = [{i for i, yes in enumerate(row) if yes} for row in hand_made().ancestors()[0].tolist()]
    assert seen == [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 4}, {0, 1, 3, 5}]


@pytest.mark.parametrize(
    ("node", "path"), [(0, [0]), (2, [0, 2]), (4, [0, 1, 4]), (5, [0, 1, 3, 5])]
)
def test_the_path_to_a_node_begins_at_the_root(node, path):
    found = hand_made().paths_to(torch.tensor([node]))[0].tolist()
    assert found == path + [0] * (4 - len(path))


def expected_length(shape: list[list[int]], rates: list[list[float]]) -> float:
    """τ = 1 + the sum of the values of the nodes."""
    return 1 + sum(float(np.prod([rates[d][r] for d, r in enumerate(path)])) for path in shape)


def test_the_best_shape_is_the_best_of_all():
    """Against every connected shape of five nodes."""
    rates = [[0.5, 0.3, 0.1], [0.6, 0.2, 0.0], [0.7, 0.1, 0.1]]
    nodes = [(), *((a,) for a in range(3)), *((a, b) for a in range(3) for b in range(3))]
    nodes += [(*path, c) for path in nodes if len(path) == 2 for c in range(3)]

    def grown(shape: frozenset, count: int, seen: set) -> None:
        if shape in seen:
            return
        seen.add(shape)
        if count:
            for path in nodes:
                if path and path not in shape and path[:-1] in shape | {()}:
                    grown(shape | {path}, count - 1, seen)

    shapes: set = set()
    grown(frozenset(), 5, shapes)
    best = max(expected_length([list(p) for p in shape], rates) for shape in shapes)
    found = best_shape(rates, num_draft_tokens=6)
    assert len(found) == 5
    assert expected_length(found, rates) == pytest.approx(best)
    Drafting.static(found)  # connected, or it would be refused


def test_a_shape_leaves_out_what_was_never_accepted():
    assert best_shape([[0.5, 0.0], [0.0, 0.0]], num_draft_tokens=9) == [[0]]
    with pytest.raises(ValueError, match="accepted none of the head's guesses"):
        best_shape([[0.0, 0.0]], num_draft_tokens=4)


def test_a_shape_goes_on_past_a_rank_that_was_never_accepted():
    """Few prompts give rates with holes: a better rank behind one must not be lost."""
    assert best_shape([[0.5, 0.0, 0.2]], num_draft_tokens=4) == [[0], [2]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Drafting.chain(0), "num_steps is 0"),
        (lambda: Drafting(num_steps=3, num_draft_tokens=8), "has topk 1 and num_draft_tokens 4"),
        (lambda: Drafting.static([]), "at least one"),
        (lambda: Drafting.static([[0], [0]]), "must be different"),
        (lambda: Drafting.static([[0], [0, 0, 0]]), "hangs in the air"),
        (lambda: Drafting.static([[1]], children="sampled"), "draw number 1"),
        (lambda: Drafting.static([[0], [-1]]), "hangs in the air"),
        (lambda: Drafting.dynamic(num_steps=3, topk=2, num_draft_tokens=12), "has 2 to 11 nodes"),
        (lambda: Drafting.dynamic(num_steps=3, topk=2, num_draft_tokens=1), "has 2 to 11 nodes"),
        (
            lambda: Drafting(
                tree="dynamic", num_steps=2, topk=2, num_draft_tokens=4, children="sampled"
            ),
            "no draws from the head's",
        ),
        (
            lambda: Drafting(tree="chain", num_steps=2, num_draft_tokens=3, ancestors="rank"),
            "belongs to a dynamic tree",
        ),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
