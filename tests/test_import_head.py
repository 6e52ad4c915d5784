"""Heads that exist already as a start: each layout they come in, and what is refused."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from data.config import TargetConfig
from data.targets.fingerprint import fingerprint
from data.targets.model import read_target_head
from tests.runs import save_tiny_run
from train.config import ExportConfig, HeadConfig, HeldoutConfig, TrainConfig
from train.fit.checkpoints import find_checkpoint
from train.fit.loop import fit
from train.head import DraftHead, draft_config
from train.serve.export import export
from train.serve.import_head import read_head

# What a published head's config.json says, in the words of Transformers 4, of the tiny target.
PUBLISHED = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bias": True,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "vocab_size": 259,
    "torch_dtype": "float16",
}


@pytest.fixture(scope="module")
def head(target_path):
    torch.manual_seed(3)
    return DraftHead(draft_config(AutoConfig.from_pretrained(target_path)))


@pytest.fixture(scope="module")
def embeddings(target_path):
    return read_target_head(TargetConfig(path=str(target_path))).embed_tokens


def publish(folder: Path, tensors: dict, **changes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**PUBLISHED, **changes}))
    save_file({name: t.contiguous().clone() for name, t in tensors.items()}, folder / "a.tmp")
    (folder / "a.tmp").rename(folder / "model.safetensors")
    return folder


@pytest.fixture
def read(head, embeddings, target_path):
    """Read a head for the tiny target."""
    known = fingerprint(TargetConfig(path=str(target_path)))

    def read(folder, **options):
        arguments = {"embed_tokens": embeddings, "known": known, **options}
        return read_head(str(folder), head.config, **arguments)

    return read


def assert_equal(tensors, head):
    expected = head.state_dict()
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


def as_safetensors(folder, tensors):
    publish(folder, tensors)


def with_prefix(folder, tensors):
    publish(folder, {f"model.{name}": tensor for name, tensor in tensors.items()})


def as_bin(folder, tensors):
    publish(folder, tensors)
    (folder / "model.safetensors").unlink()
    torch.save(dict(tensors), folder / "pytorch_model.bin")


def as_shards(folder, tensors):
    publish(folder, tensors)
    (folder / "model.safetensors").unlink()
    files = {"one.safetensors": dict(list(tensors.items())[:3])}
    files["two.safetensors"] = dict(list(tensors.items())[3:])
    for file, part in files.items():
        save_file(part, folder / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)


def with_an_epsilon_that_was_once_float32(folder, tensors):
    publish(folder, tensors, rms_norm_eps=float(torch.tensor(1e-6)))


def with_zero_bias_and_rope_buffer(folder, tensors):
    extra = {"fc.bias": torch.zeros(32), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    publish(folder, {**tensors, **extra})


@pytest.mark.parametrize(
    "layout",
    [
        as_safetensors,
        with_prefix,
        as_bin,
        as_shards,
        with_zero_bias_and_rope_buffer,
        with_an_epsilon_that_was_once_float32,
    ],
    ids=lambda layout: layout.__name__,
)
def test_a_published_head_is_read_bit_for_bit(tmp_path, head, read, layout):
    layout(tmp_path / "published", head.state_dict())
    assert_equal(read(tmp_path / "published"), head)


def test_half_precision_becomes_float32_and_a_copy_of_the_embeddings_is_no_tensor_of_ours(
    tmp_path, head, read, embeddings, caplog
):
    caplog.set_level(logging.INFO, logger="train")
    half = {name: tensor.half() for name, tensor in head.state_dict().items()}
    copy = {"embed_tokens.weight": embeddings.half()}
    tensors = read(publish(tmp_path / "half", {**half, **copy}))
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    assert torch.equal(tensors["fc.weight"], half["fc.weight"].float())
    assert "warning" not in caplog.text and "a published head" in caplog.text


@pytest.mark.parametrize("kind", ["run", "checkpoint", "vllm", "sglang"])
def test_our_own_heads_are_read_bit_for_bit(tmp_path, target_path, read, kind, caplog):
    caplog.set_level(logging.INFO, logger="train")
    folder = save_tiny_run(tmp_path / "run", target_path)
    stored = load_file(find_checkpoint(folder) / "head.safetensors")
    if kind == "checkpoint":
        folder = find_checkpoint(folder)
    elif kind != "run":
        folder = export(ExportConfig(checkpoint=str(folder), engine=kind))
    tensors = read(folder)
    assert tensors.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in tensors.items())
    assert "step 20" in caplog.text and "warning" not in caplog.text


def test_a_head_of_another_target_is_a_warning_that_names_the_field(
    tmp_path, target_path, read, caplog
):
    run = save_tiny_run(tmp_path / "run", target_path)
    other = fingerprint(TargetConfig(path=str(target_path))) | {"weights": "0123"}
    read(run, known=other)
    assert "trained for another target: weights: 0123 here" in caplog.text


def test_other_embeddings_are_a_warning_that_counts_them(tmp_path, head, read, embeddings, caplog):
    own = embeddings.clone()
    own[[5, 7]] += 0.5
    read(publish(tmp_path / "own", {**head.state_dict(), "embed_tokens.weight": own}))
    assert "2 of 259 rows differ from the target's" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 8}, "num_attention_heads 8, this target's head has 4"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4, this target's head has 2"),
        ({"head_dim": 16}, "head_dim 16, this target's head has 8"),
        ({"intermediate_size": 96}, r"intermediate_size 96.*; head.intermediate_size=96 fits"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05, this target's head has 1e-06"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2, this target's head has 1"),
        ({"hidden_act": "gelu"}, "hidden_act gelu, this target's head has silu"),
        ({"rope_theta": 5e5}, r"RoPE settings .*500000.0.* this target's head has .*10000.0"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            r"RoPE settings .*linear.* this target's head has",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_config_is_refused_by_field(tmp_path, head, read, changes, message):
    folder = publish(tmp_path / "other", head.state_dict(), **changes)
    with pytest.raises(ValueError, match=message):
        read(folder)


def damaged(name, head):
    tensors = dict(head.state_dict())
    if name == "missing":
        del tensors["layers.0.mlp.up_proj.weight"]
    elif name == "shape":
        tensors["fc.weight"] = tensors["fc.weight"][:, :32]
    elif name == "input norm":
        tensors["layers.0.input_layernorm.weight"] = torch.ones(32)
    elif name == "final norm":
        tensors["norm.weight"] = torch.ones(32)
    elif name == "qkv bias":
        tensors["layers.0.self_attn.q_proj.bias"] = torch.ones(32)
    elif name == "output head":
        tensors["lm_head.weight"] = torch.ones(259, 32)
    elif name == "eagle-3":
        tensors["midlayer.hidden_norm.weight"] = torch.ones(32)
    elif name == "not finite":
        tensors["fc.weight"] = tensors["fc.weight"].clone().fill_(float("nan"))
    elif name == "embeddings":
        tensors["embed_tokens.weight"] = torch.ones(300, 32)
    return tensors


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "layers.0.mlp.up_proj.weight is missing"),
        ("shape", r"fc.weight is \[32, 32\], this target's head has \[32, 64\]"),
        ("input norm", "layers.0.input_layernorm.weight does not belong: .*another network"),
        ("final norm", "norm.weight does not belong: .*another network"),
        ("qkv bias", "q_proj.bias does not belong: the layer has no biases"),
        ("output head", "lm_head.weight does not belong: fc and one layer are all"),
        ("eagle-3", "EAGLE-3 head"),
        ("not finite", "fc.weight holds values that are not finite"),
        ("embeddings", r"embed_tokens.weight is \[300, 32\], the target's is \[259, 32\]"),
    ],
)
def test_other_tensors_are_refused_by_name(tmp_path, head, read, name, message):
    with pytest.raises(ValueError, match=message):
        read(publish(tmp_path / "damaged", damaged(name, head)))


def test_all_that_does_not_fit_is_named_at_once(tmp_path, head, read):
    folder = publish(tmp_path / "other", damaged("missing", head), rms_norm_eps=1e-5)
    with pytest.raises(ValueError, match=r"(?s)rms_norm_eps.*up_proj.weight is missing"):
        read(folder)


def test_a_bias_of_fc_is_refused_with_the_way_out(tmp_path, head, read, caplog):
    tensors = {**head.state_dict(), "fc.bias": torch.full((32,), 0.5)}
    folder = publish(tmp_path / "biased", tensors)
    with pytest.raises(ValueError, match=r"fc.bias is not zero \(its norm is 2.83\).*init_drop_bi"):
        read(folder)
    caplog.set_level(logging.INFO, logger="train")
    assert_equal(read(folder, drop_bias=True), head)
    assert "without its fc.bias" in caplog.text


class Harmful:
    def __reduce__(self):
        return (print, ("this ran",))


def test_weights_with_code_in_them_are_never_run(tmp_path, head, read, capsys):
    as_bin(tmp_path / "published", head.state_dict())
    torch.save({"fc.weight": Harmful()}, tmp_path / "published" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="more than tensors"):
        read(tmp_path / "published")
    assert "this ran" not in capsys.readouterr().out


def test_a_folder_without_a_head_says_what_was_expected(tmp_path, read):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds no head. Expected a run \(with steps/\)"):
        read(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match=r"There is no folder .*absent"):
        read(tmp_path / "absent")


def test_a_run_starts_from_the_head_and_records_where_it_came_from(tmp_path, cache_path, head):
    folder = publish(tmp_path / "published", head.state_dict())
    config = TrainConfig(
        features=str(cache_path),
        out=str(tmp_path / "run"),
        init_from=str(folder),
        max_steps=1,
        lr=1e-30,  # too little to change a weight
        heldout=HeldoutConfig(share=0.2),
    )
    fit(config)
    checkpoint = find_checkpoint(tmp_path / "run")
    assert_equal(load_file(checkpoint / "head.safetensors"), head)
    for record in (checkpoint / "checkpoint.json", tmp_path / "run" / "run.json"):
        assert json.loads(record.read_text())["settings"]["init_from"] == str(folder)
    with pytest.raises(ValueError, match=r"init_from: .*published there, None here"):
        fit(replace(config, init_from=None))


def test_two_starts_at_once_are_refused():
    with pytest.raises(ValueError, match=r"init_from=x gives the start.*head.init=regression"):
        TrainConfig(features="", out="", init_from="x", head=HeadConfig(init="regression"))
