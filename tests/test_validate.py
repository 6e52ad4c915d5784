"""Each way in which a folder goes wrong in an engine is named, alone, with what the engine does."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import Gemma2Config

from data.config import TargetConfig
from tests.runs import save_tiny_run
from tests.targets import family_config
from tests.tiny import save_tiny_target, tiny_llama_config
from train.config import ExportConfig
from train.serve.export import export
from train.serve.folder import HeadFolder, read_folder
from train.serve.rules import NOTE, OTHER, REFUSED, RULES
from train.serve.target_facts import TargetFacts, target_facts
from train.serve.trial import Reading, trial_hits
from train.serve.validate import effects, findings, verdict

ATTENTION = "layers.0.self_attn."
MLP = "layers.0.mlp."
NORM = "layers.0.post_attention_layernorm.weight"


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> tuple[dict[str, HeadFolder], TargetFacts]:
    """The same head exported for both engines, of a target whose every setting is unusual."""
    folder = tmp_path_factory.mktemp("exports")
    config = tiny_llama_config(
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    target = save_tiny_target(folder / "target", config)
    run = save_tiny_run(folder / "run", target)
    folders = {}
    for engine in ("vllm", "sglang"):
        folders[engine] = read_folder(export(ExportConfig(checkpoint=str(run), engine=engine)))
    return folders, target_facts(TargetConfig(path=str(target)))


Break = Callable[[dict, dict, TargetFacts], None]  # of tensors and keys


def drop(name: str) -> Break:
    return lambda tensors, keys, facts: tensors.pop(name, keys.pop(name, None))


def add(name: str, *shape: int, value: float = 1.0) -> Break:
    return lambda tensors, keys, facts: tensors.update({name: torch.full(shape, value)})


def say(**changes) -> Break:
    return lambda tensors, keys, facts: keys.update(changes)


def rename(old: str, new: str) -> Break:
    def change(tensors, keys, facts):
        renamed = {name.replace(old, new, 1): tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(renamed)

    return change


def no_theta(tensors, keys, facts):
    for key in ("rope_theta", "rope_parameters"):
        del keys[key]


def other_theta(tensors, keys, facts):
    keys["rope_theta"] = keys["rope_parameters"]["rope_theta"] = 500.0


def copied(name: str, change: float = 0.0) -> Break:
    def copy(tensors, keys, facts):
        matrix = facts.embed_tokens if "embed" in name else facts.output
        tensors[name] = matrix.clone()
        tensors[name][3] += change

    return copy


def not_finite(tensors, keys, facts):
    tensors[NORM] = tensors[NORM].clone()
    tensors[NORM][0] = float("nan")


def half(tensors, keys, facts):
    for name in tensors:
        tensors[name] = tensors[name].half()


def all_bfloat16(tensors, keys, facts):
    keys["torch_dtype"] = "bfloat16"
    for name in tensors:
        tensors[name] = tensors[name].bfloat16()


def flat(tensors, keys, facts):
    tensors["fc.weight"] = tensors["fc.weight"][:, :32]


def transposed(tensors, keys, facts):
    name = f"{MLP}down_proj.weight"
    tensors[name] = tensors[name].T


NEVER = "-"
# rule, what breaks it, and what ENGINES.md says of vLLM and SGLang; two dashes: seen by neither
CASES = [
    ("prefix", rename("", "model."), REFUSED, OTHER),
    ("layer-name", rename("layers.0", "layers.32"), REFUSED, OTHER),
    ("extra-layer", add("layers.1.mlp.up_proj.weight", 64, 32), REFUSED, OTHER),
    ("missing-fc", drop("fc.weight"), OTHER, OTHER),
    ("missing-attention", drop(f"{ATTENTION}q_proj.weight"), OTHER, OTHER),
    ("missing-attention", drop(f"{ATTENTION}o_proj.weight"), OTHER, OTHER),
    ("missing-mlp", drop(f"{MLP}up_proj.weight"), OTHER, OTHER),
    ("missing-norm", drop(NORM), OTHER, OTHER),
    ("fc-bias-missing", drop("fc.bias"), NEVER, OTHER),
    ("fc-bias-zero", add("fc.bias", 32, value=0.0), NOTE, NEVER),
    ("fc-bias-used", add("fc.bias", 32), OTHER, NEVER),
    ("qkv-bias", add(f"{ATTENTION}q_proj.bias", 64), OTHER, OTHER),
    ("unknown-bias", add(f"{ATTENTION}o_proj.bias", 32), OTHER, OTHER),
    ("own-embedding", copied("embed_tokens.weight", 1.0), OTHER, NOTE),
    ("embedding-copy", copied("embed_tokens.weight"), NOTE, NOTE),
    ("embedding-shape", add("embed_tokens.weight", 300, 32), REFUSED, REFUSED),
    ("output-head", copied("lm_head.weight"), REFUSED, NOTE),
    ("output-head", add("lm_head.weight", 7, 32), REFUSED, NOTE),
    ("extra-norm", add("norm.weight", 32), REFUSED, OTHER),
    ("extra-norm", add("layers.0.input_layernorm.weight", 32), REFUSED, OTHER),
    ("eagle3", add("d2t", 259), REFUSED, OTHER),
    ("eagle3", add("midlayer.hidden_norm.weight", 32), REFUSED, OTHER),
    ("rope-buffer", add("layers.0.self_attn.rotary_emb.inv_freq", 8), NOTE, NOTE),
    ("unknown-tensor", add("projector.weight", 32), REFUSED, OTHER),
    ("truncated", say(intermediate_size=48), OTHER, OTHER),
    ("truncated", say(num_key_value_heads=1), OTHER, OTHER),
    ("padded", say(intermediate_size=96), REFUSED, OTHER),
    ("wrong-shape", flat, REFUSED, REFUSED),
    ("wrong-shape", transposed, REFUSED, REFUSED),
    ("not-finite", not_finite, OTHER, OTHER),
    ("weights-dtype", half, NOTE, NOTE),
    ("model-type", drop("model_type"), REFUSED, REFUSED),
    ("architecture-absent", drop("architectures"), REFUSED, REFUSED),
    ("architecture-unknown", say(architectures=["Nobody"]), REFUSED, REFUSED),
    ("architecture-unknown", say(architectures=["Qwen2ForCausalLM"]), REFUSED, NEVER),
    ("architecture-class", say(architectures=["MistralForCausalLM"]), OTHER, NEVER),
    ("architecture-class", say(architectures=["MistralForCausalLMEagle"]), NEVER, OTHER),
    ("architecture-plain", say(architectures=["LlamaForCausalLM"]), NEVER, OTHER),
    ("layer-count", drop("num_hidden_layers"), OTHER, OTHER),
    ("layer-count", say(num_hidden_layers=2), OTHER, OTHER),
    ("vocab-size", drop("vocab_size"), OTHER, OTHER),
    ("vocab-size", say(vocab_size=100), OTHER, OTHER),
    ("rope-missing", no_theta, OTHER, OTHER),
    ("rope-other", other_theta, NOTE, NOTE),
    ("epsilon-missing", drop("rms_norm_eps"), OTHER, OTHER),
    ("epsilon-other", say(rms_norm_eps=1e-4), NOTE, NOTE),
    ("positions", say(max_position_embeddings=512), OTHER, REFUSED),
    ("positions", drop("max_position_embeddings"), OTHER, REFUSED),
    ("bias-keys", say(bias=True), OTHER, NOTE),
    ("bias-keys", say(attention_bias=True), OTHER, NOTE),
    ("tied-flag", say(tie_word_embeddings=True), NEVER, REFUSED),
    ("dtype", all_bfloat16, NEVER, REFUSED),
    ("dtype", drop("torch_dtype"), NEVER, REFUSED),
    ("activation", say(hidden_act="gelu"), REFUSED, REFUSED),
]
# Said of a file, or of the target, and tested below.
ELSEWHERE = {"no-weights", "missing-shard", "second-file", "altered-weights", "soft-cap"}
ELSEWHERE |= {"target-family", "fc-halves", "rope-guess", "predicts-nothing", "dtype-float32"}
ELSEWHERE |= {"hidden-size", "head-dim", "target-window"}


def broken(folder: HeadFolder, change: Break, facts: TargetFacts) -> HeadFolder:
    tensors, keys = dict(folder.tensors), dict(folder.keys)
    keys["rope_parameters"] = dict(keys["rope_parameters"])
    change(tensors, keys, facts)
    return replace(folder, tensors=tensors, keys=keys)


def rules_of(folder: HeadFolder, facts: TargetFacts, engine: str) -> dict[str, str]:
    return {f.rule: f.verdict for f in findings(folder, facts) if f.engine == engine}


@pytest.mark.parametrize(("rule", "change", "vllm", "sglang"), CASES)
def test_each_fault_alone_is_named_with_what_each_engine_does(exports, rule, change, vllm, sglang):
    folders, facts = exports
    for engine, expected in (("vllm", vllm), ("sglang", sglang)):
        before = rules_of(folders[engine], facts, engine)
        after = rules_of(broken(folders[engine], change, facts), facts, engine)
        new = {name: after[name] for name in after.keys() - before.keys()}
        if rule == "weights-dtype":
            new.pop("dtype-float32", None)
        if expected == NEVER:
            assert rule not in new
        else:
            assert new == {rule: expected}, engine


def test_no_rule_is_without_a_test():
    assert {rule for rule, *_ in CASES} | ELSEWHERE == set(RULES)
    assert not {rule for rule, *_ in CASES} & ELSEWHERE


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_our_own_exports_load_as_they_are_meant(exports, engine):
    folders, facts = exports
    found = findings(folders[engine], facts)
    assert verdict(found, engine) == NOTE
    assert rules_of(folders[engine], facts, engine).keys() <= {"dtype-float32"}
    assert verdict(found, "sglang" if engine == "vllm" else "vllm") != NOTE


def test_a_head_dim_that_only_the_key_tells_is_missed(exports):
    """The tensors then look cut as well: two findings of one cause."""
    folders, facts = exports
    new = rules_of(broken(folders["vllm"], drop("head_dim"), facts), facts, "vllm")
    assert new["head-dim"] == OTHER and new["truncated"] == OTHER


def test_another_hidden_size_than_the_targets_is_refused(exports):
    folders, facts = exports
    new = rules_of(broken(folders["sglang"], say(hidden_size=64), facts), facts, "sglang")
    assert new["hidden-size"] == REFUSED


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_files_that_engines_would_mix_up_or_miss_are_named(exports, engine, tmp_path):
    folders, facts = exports
    tensors = folders[engine].tensors

    def written(name: str, **files: dict) -> set[str]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_bytes((folders[engine].path / "config.json").read_bytes())
        for file, part in files.items():
            save_file(part, folder / f"{file}.safetensors")
        return rules_of(read_folder(folder), facts, engine).keys() - {"dtype-float32"}

    assert written("none") >= {"no-weights"}
    assert written("stale", model=tensors, old={"fc.weight": tensors["fc.weight"]}) == {
        "second-file"
    }
    names = list(tensors)
    parts = {"a": {n: tensors[n] for n in names[:4]}, "b": {n: tensors[n] for n in names[4:]}}
    assert written("sharded", **parts) == set()
    index = '{"weight_map": {"fc.weight": "a.safetensors", "x": "gone.safetensors"}}'
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text(index)
    read = read_folder(tmp_path / "sharded")
    assert "missing-shard" in rules_of(read, facts, engine)


def test_weights_that_changed_after_the_export_are_named(exports, tmp_path):
    folders, facts = exports
    for file in folders["vllm"].path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert not read_folder(tmp_path).altered
    swapped = folders["vllm"].tensors | {"fc.weight": folders["vllm"].tensors["fc.weight"].roll(32)}
    save_file(swapped, tmp_path / "model.safetensors")
    assert "altered-weights" in rules_of(read_folder(tmp_path), facts, "vllm")


@pytest.mark.parametrize(("engine", "rule"), [("vllm", "target-family"), ("sglang", "soft-cap")])
def test_what_the_target_itself_asks_of_an_engine_is_named(tmp_path, engine, rule):
    sizes = {
        k: v for k, v in tiny_llama_config().to_dict().items() if k.endswith(("size", "heads"))
    }
    config = Gemma2Config(**sizes, head_dim=8, final_logit_softcapping=30.0)
    target = save_tiny_target(tmp_path / "target", config)
    run = save_tiny_run(tmp_path / "run", target)
    folder = read_folder(export(ExportConfig(checkpoint=str(run), engine=engine)))
    facts = target_facts(TargetConfig(path=str(target)))
    if rule == "soft-cap":
        assert rule not in rules_of(folder, facts, engine)
        folder = broken(folder, drop("final_logit_softcapping"), facts)
    assert rule in rules_of(folder, facts, engine)


@pytest.mark.parametrize(
    ("family", "changes", "noted"),
    [
        ("mistral", {"sliding_window": 8}, True),
        ("mistral", {"sliding_window": None}, False),
        ("gemma3_text", {"sliding_window": 8, "num_hidden_layers": 6}, False),  # some layers do not
        ("qwen2", {}, False),
    ],
)
def test_a_target_whose_layers_all_slide_is_noted_for_vllm(tmp_path, family, changes, noted):
    """vLLM makes the head slide too: seen by comparing its module's output behind the window."""
    target = save_tiny_target(tmp_path / "target", family_config(family, **changes))
    folder = read_folder(
        export(ExportConfig(checkpoint=str(save_tiny_run(tmp_path / "run", target))))
    )
    facts = target_facts(TargetConfig(path=str(target)))
    assert ("target-window" in rules_of(folder, facts, "vllm")) == noted
    assert "target-window" not in rules_of(folder, facts, "sglang")


def readings(*agreements: float) -> list[Reading]:
    """As it is, swapped, with the target's RoPE, both."""
    ways = [(False, False), (True, False), (False, True), (True, True)]
    return [
        Reading(swapped=s, target_rope=r, agreement=a, loss=1 - a)
        for (s, r), a in zip(ways, agreements, strict=True)
    ]


@pytest.mark.parametrize(
    ("agreements", "rules"),
    [
        ((0.30, 0.01, 0.30, 0.01), set()),
        ((0.01, 0.30, 0.01, 0.30), {"fc-halves"}),
        ((0.30, 0.01, 0.40, 0.01), {"rope-guess"}),
        ((0.01, 0.30, 0.01, 0.40), {"fc-halves", "rope-guess"}),
        ((0.01, 0.01, 0.01, 0.01), {"predicts-nothing"}),
    ],
)
def test_the_reading_that_predicts_the_target_tells_what_names_and_shapes_cannot(agreements, rules):
    found = effects(trial_hits(readings(*agreements)))
    assert {one.rule for one in found if one.engine == "vllm"} == rules
    assert all(one.verdict == OTHER for one in found)


def test_a_bin_with_code_in_it_is_never_run(tmp_path, capsys):
    class Harmful:
        def __reduce__(self):
            return (print, ("this ran",))

    (tmp_path / "config.json").write_text("{}")
    torch.save({"fc.weight": Harmful()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="more than tensors"):
        read_folder(tmp_path)
    assert "this ran" not in capsys.readouterr().out


def test_a_folder_without_config_says_what_lies_there(tmp_path: Path):
    (tmp_path / "optimizer.pt").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"no config.json \(there: optimizer.pt\)"):
        read_folder(tmp_path)
