"""SGLang's own scheduler and EAGLE worker on our export: the same answers, trees and numbers.

Over the stand-ins of train/serve/sglang_cpu, whose docstring says what is not real.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from data.config import TargetConfig
from data.targets.model import load_target
from tests.heads import export_tiny, random_prompts, trained_head
from tests.tiny import save_tiny_target, tiny_llama_config
from train.config import HeldoutConfig, TokenMapConfig
from train.decode import Drafting, plain_generate, speculative_generate
from train.serve.engine_sglang import PYTHON, decode_with_sglang
from train.token_map import build_token_map

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not PYTHON.is_file(), reason="no SGLang: . scripts/setup.sh && setup_sglang"
    ),
]
NEW_TOKENS = 24
SHAPES = {
    "chain": Drafting.chain(3),
    "narrow": Drafting.dynamic(num_steps=4, topk=4, num_draft_tokens=10, ancestors="rank"),
    "deep": Drafting.dynamic(num_steps=5, topk=4, num_draft_tokens=8, ancestors="rank"),
}
BATCH = {"chain": 2, "narrow": 1, "deep": 4}


class Case:
    """A tiny target with a head that accepts some of what it drafts."""

    def __init__(self, folder: Path) -> None:
        path = save_tiny_target(folder / "target", tiny_llama_config())
        self.config = TargetConfig(path=str(path), device="cpu")
        self.target = load_target(self.config)
        self.prompts = random_prompts(self.target, [7, 20, 33, 12])
        self.head = trained_head(self.target, self.prompts, steps=40)
        attention = self.head.layer.self_attn
        # So strong that trees show who attends to whom; any stronger, and confidences become
        # exactly 1. Where a child ties with its parent, SGLang may keep the child alone.
        with torch.no_grad():
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                projection.weight *= 5
        self.export = export_tiny(self.head, self.target, folder, engine="sglang")
        self.folder = folder

    def sglang(self, drafting: Drafting, name: str, **settings) -> dict:
        return decode_with_sglang(
            settings.pop("folder", self.export),
            self.config,
            [ids.tolist() for ids in self.prompts],
            drafting=drafting,
            max_new_tokens=NEW_TOKENS,
            stop_ids=(),
            out=self.folder / name,
            **settings,
        )


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    return Case(tmp_path_factory.mktemp("sglang"))


@pytest.fixture(scope="module")
def plain(case) -> list[list[int]]:
    return [
        plain_generate(case.target, ids, max_new_tokens=NEW_TOKENS, stop_ids=()).tokens
        for ids in case.prompts
    ]


@pytest.fixture(scope="module", params=SHAPES)
def decoded(request, case) -> tuple[Drafting, dict]:
    name = request.param
    tensors = case.folder / "drafts.safetensors" if name == "narrow" else None
    drafting = SHAPES[name]
    return drafting, case.sglang(drafting, name, batch_size=BATCH[name], tensors=tensors)


def test_answers_trees_and_acceptance_are_ours(decoded, case, plain):
    drafting, result = decoded
    for answer, ids, tokens in zip(result["answers"], case.prompts, plain, strict=True):
        ours = speculative_generate(
            case.target,
            case.head,
            ids,
            drafting=drafting,
            max_new_tokens=NEW_TOKENS,
            stop_ids=(),
            record=True,
        )
        assert answer["tokens"] == ours.tokens == tokens
        assert answer["accepted"] == ours.accepted
        for theirs, own in zip(answer["rounds"], ours.rounds, strict=True):
            assert paths(theirs["tokens"], theirs["parents"]) == paths(own.tokens, own.parents)
    accepted = [count for answer in result["answers"] for count in answer["accepted"]]
    assert 0 < sum(accepted) < drafting.num_steps * len(accepted)  # some, and not all


def paths(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    """A tree as what one can read from its root to each of its nodes."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*found[parent], token) if parent >= 0 else (token,))
    assert len(set(found)) == len(tokens)
    return set(found)


def test_the_true_ancestors_of_the_paper_give_other_trees_than_sglang(case):
    """The quirk is real, and `ancestors="rank"` is what reproduces it."""
    settings = dict(num_steps=4, topk=4, num_draft_tokens=10)
    trees = {}
    for ancestors in ("rank", "path"):
        answers = speculative_generate(
            case.target,
            case.head,
            case.prompts,
            drafting=Drafting.dynamic(**settings, ancestors=ancestors),
            max_new_tokens=NEW_TOKENS,
            stop_ids=(),
            record=True,
        )
        trees[ancestors] = [paths(r.tokens, r.parents) for a in answers for r in a.rounds]
    assert trees["rank"] != trees["path"]


@pytest.fixture(scope="module")
def drafts(case) -> Path:
    """What SGLang's draft model read and computed while it decoded the narrow tree."""
    file = case.folder / "drafts.safetensors"
    if not file.is_file():
        case.sglang(SHAPES["narrow"], "narrow-alone", tensors=file)
    return file


def test_the_draft_models_features_and_logits_are_ours_to_rounding(case, plain, drafts):
    calls = forwards(load_file(drafts))
    errors = list(replay(case, calls))
    modes = {call["mode"] for call in calls}
    assert modes == {"EXTEND", "DECODE", "DRAFT_EXTEND_V2"}
    assert len(errors) == len(calls) > 40
    assert max(errors) < 1e-4, max(errors)


def test_the_draft_model_reads_the_targets_features_after_its_final_norm(case, plain, drafts):
    first = forwards(load_file(drafts))[0]
    ids = case.prompts[0]
    assert_close(first["features"], case.target.features(ids[None])[0], rtol=1e-5, atol=1e-5)
    assert first["input_ids"].tolist() == [*ids[1:].tolist(), plain[0][0]]
    assert first["positions"].tolist() == list(range(len(ids)))


def test_a_token_map_is_read_and_nothing_else_is_drafted(case, plain, cache_path):
    file = case.folder / "map.pt"
    heldout = HeldoutConfig(share=0.2)
    allowed = build_token_map(
        TokenMapConfig(features=str(cache_path), size=40, out=str(file), heldout=heldout)
    )
    drafted = {}
    for name, token_map in (("with", file), ("without", None)):
        result = case.sglang(SHAPES["narrow"], f"map-{name}", token_map=token_map)
        assert [answer["tokens"] for answer in result["answers"]] == plain
        trees = [tree for answer in result["answers"] for tree in answer["rounds"]]
        drafted[name] = {token for tree in trees for token in tree["tokens"][1:]}
    assert len(drafted["with"]) > 10 and drafted["with"] <= set(allowed)
    assert not drafted["without"] <= set(allowed)


def test_swapped_halves_of_fc_are_seen_in_the_acceptance_alone(case, plain):
    """SGLang loads them without a word: the loader cannot tell, the decoding does."""
    swapped = case.folder / "swapped"
    shutil.copytree(case.export, swapped)
    tensors = load_file(swapped / "model.safetensors")
    tensors["fc.weight"] = torch.cat(tensors["fc.weight"].chunk(2, dim=1)[::-1], dim=1)
    save_file(tensors, swapped / "model.safetensors", metadata={"format": "pt"})
    result = case.sglang(SHAPES["chain"], "swapped-out", folder=swapped)
    assert [answer["tokens"] for answer in result["answers"]] == plain
    good = sum(
        sum(
            speculative_generate(
                case.target,
                case.head,
                ids,
                drafting=SHAPES["chain"],
                max_new_tokens=NEW_TOKENS,
                stop_ids=(),
            ).accepted
        )
        for ids in case.prompts
    )
    assert sum(sum(answer["accepted"]) for answer in result["answers"]) < 0.8 * good


def forwards(tensors: dict[str, Tensor]) -> list[dict]:
    """What went into the draft model and came out of it, call by call."""
    calls: dict[str, dict] = {}
    for name in sorted(tensors):
        number, mode, what = name.split(".")
        calls.setdefault(number, {"mode": mode})[what] = tensors[name]
    return list(calls.values())


@torch.no_grad()
def replay(case: Case, calls: list[dict]):
    """Run the head on what SGLang's draft model was given. Yields the largest difference of each.

    Keys of real pairs are kept by position. Step s of a draft is kept by the rank of its beam,
    which attends to the real pairs and to the steps of its own rank: SGLang leaves keys where they
    are when it sorts the beam anew.
    """
    head = case.head
    shape = (head.config.num_key_value_heads, 512, head.config.head_dim)
    keys, values = torch.zeros(shape), torch.zeros(shape)
    own: list[tuple[Tensor, Tensor]] = []
    for call in calls:
        positions = call["positions"]
        x = head.fuse(case.target.head.embed(call["input_ids"]), call["features"])
        query, key, value = head.query_key_value(x, positions)
        if call["mode"] == "DECODE":
            own.append((key, value))
            length = int(positions[0]) - len(own) + 1
            attended = [
                attend(
                    query[:, [rank]],
                    torch.cat([keys[:, :length], *(k[:, [rank]] for k, _ in own)], dim=1),
                    torch.cat([values[:, :length], *(v[:, [rank]] for _, v in own)], dim=1),
                )
                for rank in range(len(x))
            ]
        else:
            own = []
            keys[:, positions], values[:, positions] = key, value
            attended = [
                attend(query[:, [row]], keys[:, : position + 1], values[:, : position + 1])
                for row, position in enumerate(positions.tolist())
            ]
        hidden = head.finish(x, torch.cat(attended, dim=1))
        logits = case.target.head.logits(hidden)[-len(call["logits"]) :]
        yield max(
            float((logits - call["logits"]).abs().max()),
            float((hidden[-len(call["hidden"]) :] - call["hidden"]).abs().max()),
        )


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """query: [heads, 1, d], key and value: [kv_heads, T, d] -> [heads, 1, d]."""
    return torch.nn.functional.scaled_dot_product_attention(
        query[None], key[None], value[None], enable_gqa=True
    )[0]
