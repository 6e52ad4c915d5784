"""Trees in the caches of target and head: every path as if it were alone."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from data.config import TargetConfig
from data.targets.model import Target, load_target
from tests.decoding import DRAFTINGS, path_tokens
from tests.heads import random_head, random_prompts
from tests.targets import FAMILIES, family_config, wrapped_config
from tests.tiny import save_tiny_target
from train.decode import Drafting, HeadStream, Sampling, TargetStream
from train.decode.rounds import draft_tree
from train.decode.tree import Tree, padded
from train.head import DraftHead

# All candidates of four layers: the beam is sorted anew between them.
KINDS = {**DRAFTINGS, "deep": Drafting.dynamic(num_steps=4, topk=3, num_draft_tokens=31)}


@pytest.fixture(scope="module")
def target(target_path) -> Target:
    """In float64: a difference is no rounding."""
    target = load_target(TargetConfig(path=str(target_path), dtype="float32", device="cpu"))
    target.model.double()
    target.head.double()
    target.dtype = torch.float64
    return target


@pytest.fixture(scope="module")
def head(target) -> DraftHead:
    """A head whose attention is so strong that it matters what a pair attends to."""
    head = random_head(target).double()
    with torch.no_grad():
        for parameter in (head.fc.weight, *head.layer.self_attn.parameters()):
            parameter.mul_(12)
    return head


def random_trees(count: int, *, nodes: int = 9, seed: int = 0) -> Tree:
    """Any trees: each node's parent is one of those before it."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.zeros(count, nodes, dtype=torch.long)
    depths = torch.zeros_like(parents)
    for node in range(1, nodes):
        parents[:, node] = torch.randint(0, node, (count,), generator=generator)
        depths[:, node] = depths.gather(1, parents[:, node, None])[:, 0] + 1
    return Tree(
        tokens=torch.randint(3, 259, (count, nodes), generator=generator),
        parents=parents,
        depths=depths,
        ranks=torch.zeros_like(parents),
        confidences=torch.ones(count, nodes),
        num_steps=int(depths.max()),
    )


def paths_of(tree: Tree, row: int) -> list[list[int]]:
    """The nodes from the root to each node."""
    parents = tree.parents[row].tolist()
    paths = [[0]]
    for node in range(1, len(parents)):
        paths.append([*paths[parents[node]], node])
    return paths


def assert_paths_as_if_alone(target: Target, prompts: list[Tensor]) -> None:
    """Two rounds: the features of all nodes, and of those after an accepted path."""
    stream = TargetStream(target, len(prompts))
    stream.append(padded([p.tolist() for p in prompts], target.device), list(map(len, prompts)))
    texts = [prompt.tolist() for prompt in prompts]
    for round_number in range(2):
        tree = random_trees(len(prompts), seed=round_number)
        features = stream.try_tree(tree)
        kept = []
        for row, text in enumerate(texts):
            tokens = tree.tokens[row].tolist()
            paths = paths_of(tree, row)
            for node, path in enumerate(paths):
                alone = target.features(torch.tensor([text + [tokens[n] for n in path]]))[0, -1]
                assert_close(features[row, node], alone, rtol=1e-4, atol=1e-4)
            kept.append(paths[4 + row])
            text += [tokens[n] for n in kept[-1]]
        stream.keep(kept, width=tree.tokens.shape[1])
        assert stream.lengths == list(map(len, texts))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", [*FAMILIES, "gemma3", "mistral3"])
def test_the_target_runs_every_path_of_a_tree_as_if_it_were_alone(tmp_path, family, batch):
    """Prompts shorter and longer than the window of 8 that half of the families have."""
    config = family_config(family) if family in FAMILIES else wrapped_config(family)
    save_tiny_target(tmp_path, config)
    target = load_target(TargetConfig(path=str(tmp_path), dtype="float32", device="cpu"))
    with torch.inference_mode():
        assert_paths_as_if_alone(target, random_prompts(target, [13, 3, 9][:batch]))


def cache_of(stream: TargetStream, row: int) -> list[Tensor]:
    end = stream.lengths[row]
    layers = stream._cache.layers
    return [part[row, :, :end] for layer in layers for part in (layer.keys, layer.values)]


def test_the_cache_after_acceptance_is_that_of_the_accepted_tokens(target):
    prompts = random_prompts(target, [7, 12, 1, 9])
    texts = [prompt.tolist() for prompt in prompts]
    with torch.inference_mode():
        stream = TargetStream(target, 4)
        stream.append(padded(texts, target.device), list(map(len, texts)))
        rows = [0, 1, 2, 3]
        for number in range(5):
            if number == 3:  # two answers are finished
                rows = [1, 2]
                stream.keep_rows(rows)
            tree = random_trees(len(rows), seed=10 + number)
            stream.try_tree(tree)
            kept = [paths_of(tree, i)[(5 * i + 3 * number) % 9] for i in range(len(rows))]
            stream.keep(kept, width=9)
            for i, row in enumerate(rows):
                texts[row] += [int(tree.tokens[i, node]) for node in kept[i]]
        for i, row in enumerate(rows):
            fresh = TargetStream(target)
            fresh.append(torch.tensor([texts[row]]))
            assert stream.lengths[i] == len(texts[row])
            for grown, at_once in zip(cache_of(stream, i), cache_of(fresh, 0), strict=True):
                assert_close(grown, at_once, rtol=1e-4, atol=1e-4)


# --- the head -----------------------------------------------------------------------------------


class Text:
    """A text with its features, and what the head makes of pairs that follow its real ones."""

    def __init__(self, target: Target, head: DraftHead, length: int, *, seed: int) -> None:
        self.target, self.head = target, head
        self.tokens = random_prompts(target, [length + 1], seed=seed)[0]
        self.features = target.features(self.tokens[None])[0, :-1]  # f_j of pair j

    @property
    def newest(self) -> Tensor:
        return self.tokens[-1]

    @torch.no_grad()
    def output(self, tokens: list[int], features: list[Tensor]) -> Tensor:
        """The head's output for the last of some guessed pairs; of the last real one if none."""
        all_tokens = torch.cat([self.tokens[1:], torch.tensor(tokens, dtype=torch.long)])
        all_features = torch.cat([self.features, *(f[None] for f in features)])
        return self.head(self.target.head.embed(all_tokens), all_features, [len(all_tokens)])[-1]

    def follow(self, tokens: list[int]) -> Tensor:
        """The head's output after a path of drafted tokens, one forward after the other."""
        outputs = [self.output([], [])]
        for end in range(1, len(tokens) + 1):
            outputs.append(self.output(tokens[:end], outputs))
        return outputs[-1]

    def probs(self, hidden: Tensor) -> Tensor:
        return self.target.head.logits(hidden).softmax(-1)


@torch.inference_mode()
def drafted(target: Target, head: DraftHead, texts: list[Text], drafting: Drafting) -> Tree:
    """The tree behind each text, whose real pairs come in two pieces."""
    lengths = [len(text.features) for text in texts]
    stream = HeadStream(head, target.head, batch_size=len(texts), capacity=max(lengths) + 64)
    cuts = [0] * len(texts), [(2 * n) // 3 for n in lengths], lengths
    for start, end in pairwise(cuts):
        counts = [e - s for s, e in zip(start, end, strict=True)]
        pieces = list(zip(texts, start, end, strict=True))
        width = max(counts)
        features = torch.stack(
            [
                torch.nn.functional.pad(text.features[s:e], (0, 0, 0, width - (e - s)))
                for text, s, e in pieces
            ]
        )
        tokens = padded(
            [text.tokens[s + 1 : e + 1].tolist() for text, s, e in pieces], target.device
        )
        hidden = stream.extend(features, tokens, counts)
        newest = torch.stack([text.tokens[e] for text, _, e in pieces])
        tree = draft_tree(drafting, Sampling(), stream, hidden, newest, [])
    return tree


@pytest.mark.parametrize("lengths", [[9], [9, 4, 15]], ids=["one", "batch"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_head_runs_every_path_of_a_tree_as_if_it_were_alone(target, head, kind, lengths):
    texts = [Text(target, head, n, seed=n) for n in lengths]
    tree = drafted(target, head, texts, KINDS[kind])
    for row, text in enumerate(texts):
        tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
        assert tokens[0] == text.newest
        for node in range(1, len(tokens)):
            hidden = text.follow(path_tokens(tokens, parents, parents[node]))
            probs = text.probs(hidden)
            best = probs.topk(int(tree.ranks[row, node]) + 1).indices[-1]
            assert tokens[node] == best
            assert_close(tree.confidences[row, node], probs[best].float(), rtol=1e-4, atol=1e-5)


def with_slots_of_ranks(text: Text, *, num_steps: int, topk: int) -> list[list[tuple]]:
    """The children (token, confidence) of each rank of each layer, as SGLang's slots have it.

    Pair s of rank k lies in slot (k, s), and rank k sees slots (k, 0 ... s): where the beam is
    sorted anew, those may be pairs of other paths. One layer's keys and values depend on the pair
    and its place only, so a rank's slots are a text of their own.
    """

    def children(hidden: Tensor) -> list[tuple[int, Tensor]]:
        confidences, tokens = text.probs(hidden).topk(topk)
        return list(zip(tokens.tolist(), confidences, strict=True))

    first = text.output([], [])
    beam = [(token, value, first) for token, value in children(first)]
    slots: list[list[tuple[int, Tensor]]] = [[] for _ in range(topk)]
    layers = [[children(first)]]
    for _ in range(1, num_steps):
        grown = []
        for rank, (token, _, feature) in enumerate(beam):
            slots[rank].append((token, feature))
            grown.append(text.output(*map(list, zip(*slots[rank], strict=True))))
        layers.append([children(hidden) for hidden in grown])
        candidates = [
            (token, beam[rank][1] * confidence, grown[rank])
            for rank in range(topk)
            for token, confidence in layers[-1][rank]
        ]
        beam = sorted(candidates, key=lambda c: -c[1])[:topk]
    return layers


def test_sglangs_keys_by_rank_are_an_option(target, head):
    size = {"num_steps": 4, "topk": 3}
    everything = 1 + 3 + 3 * 9
    differs = 0
    for seed in range(6):
        text = Text(target, head, 8, seed=seed)
        trees = {
            kind: drafted(
                target,
                head,
                [text],
                Drafting.dynamic(**size, num_draft_tokens=everything, ancestors=kind),
            )
            for kind in ("rank", "path")
        }
        expected = with_slots_of_ranks(text, **size)
        flat = [child for layer in expected for rank in layer for child in rank]
        tree = trees["rank"]
        assert tree.tokens[0, 1:].tolist() == [token for token, _ in flat]
        assert_close(
            tree.confidences[0, 1:], torch.stack([c for _, c in flat]).float(), rtol=1e-4, atol=1e-5
        )
        gap = (tree.confidences - trees["path"].confidences).abs().max()
        differs += bool(gap > 0.01)
    assert differs  # or the option would be none


def test_the_heads_cache_keeps_real_pairs_only(target, head):
    """Grown round by round, with guessed pairs in between, it equals one built at once."""
    texts = [Text(target, head, n, seed=n) for n in (25, 18)]

    @torch.inference_mode()
    def grown(pieces: list[list[int]]) -> HeadStream:
        stream = HeadStream(head, target.head, batch_size=2, capacity=60)
        starts = [0, 0]
        for counts in pieces:
            width = max(counts)
            # Behind the end of a text stands its last pair again, as padding.
            rows = [torch.arange(start, start + width) for start in starts]
            features, tokens = (
                torch.stack(
                    [part[r.clamp(max=len(part) - 1)] for part, r in zip(parts, rows, strict=True)]
                )
                for parts in ([t.features for t in texts], [t.tokens[1:] for t in texts])
            )
            hidden = stream.extend(features, tokens, counts)
            draft_tree(DRAFTINGS["dynamic"], Sampling(), stream, hidden, tokens[:, 0], [])
            starts = [s + count for s, count in zip(starts, counts, strict=True)]
        return stream

    pieces = [[13, 9], [1, 3], [3, 1], [5, 4], [3, 1]]
    stream, at_once = grown(pieces), grown([[25, 18]])
    assert stream.lengths == at_once.lengths == [25, 18]
    for row, length in enumerate(stream.lengths):
        for part in ("keys", "values"):
            found, expected = getattr(stream, part)[row], getattr(at_once, part)[row]
            assert_close(found[:, :length], expected[:, :length], rtol=1e-4, atol=1e-5)
