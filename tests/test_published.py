"""Heads in the layout of the EAGLE repository: written, read, measured, trained on, exported."""

import itertools
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close
from transformers import AutoConfig

from data.config import TargetConfig
from data.targets.model import read_target_head
from tests.test_import_head import publish
from train.config import ExportConfig
from train.head import DraftHead, draft_config
from train.serve.export import export, load_exported
from train.serve.folder import head_folder
from train.serve.import_head import load_head_folder, read_head


@pytest.fixture(scope="module")
def head(target_path) -> DraftHead:
    torch.manual_seed(3)
    return DraftHead(draft_config(AutoConfig.from_pretrained(target_path))).eval()


@pytest.fixture(scope="module")
def target(target_path) -> TargetConfig:
    return TargetConfig(path=str(target_path))


@pytest.fixture(scope="module")
def embeddings(target) -> torch.Tensor:
    return read_target_head(target).embed_tokens


class RepositorysModel(nn.Module):
    """The modules that the EAGLE repository fills with `load_state_dict(…, strict=True)`."""

    def __init__(self, keys: dict) -> None:
        super().__init__()
        hidden, width = keys["hidden_size"], keys["intermediate_size"]
        q = keys["num_attention_heads"] * keys["head_dim"]
        kv = keys["num_key_value_heads"] * keys["head_dim"]
        self.embed_tokens = nn.Embedding(keys["vocab_size"], hidden)
        self.fc = nn.Linear(2 * hidden, hidden, bias=keys.get("bias", True))
        layer = nn.Module()
        layer.self_attn, layer.mlp = nn.Module(), nn.Module()
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            setattr(layer.self_attn, f"{name}_proj", nn.Linear(hidden, rows, bias=False))
        layer.self_attn.o_proj = nn.Linear(q, hidden, bias=False)
        for name in ("gate", "up"):
            setattr(layer.mlp, f"{name}_proj", nn.Linear(hidden, width, bias=False))
        layer.mlp.down_proj = nn.Linear(width, hidden, bias=False)
        layer.post_attention_layernorm = nn.RMSNorm(hidden)
        self.layers = nn.ModuleList([layer])


def test_an_export_for_the_repository_fills_its_model_strictly(run_path, embeddings, tmp_path):
    out = export(ExportConfig(checkpoint=str(run_path), engine="eagle", out=str(tmp_path / "out")))

    keys = json.loads((out / "config.json").read_text())
    model = RepositorysModel(keys)
    state = torch.load(out / "pytorch_model.bin", weights_only=True)
    model.load_state_dict(state, strict=True)
    assert keys["architectures"] == ["LlamaForCausalLM"] and keys["bias"] is False
    assert torch.equal(model.embed_tokens.weight, embeddings)
    stored = load_file(run_path / "steps" / "000020" / "head.safetensors")
    assert all(torch.equal(state[name], tensor) for name, tensor in stored.items())
    assert not list(out.glob("*.safetensors"))
    assert "--ea-model-path" in (out / "README.md").read_text()
    assert load_exported(out)[1]["engine"] == "eagle"


def published(
    folder: Path, head: DraftHead, embeddings: torch.Tensor, *, bias: str, copy: bool, prefix: str
) -> tuple[Path, torch.Tensor]:
    """A stranger's folder, and the bias of its fc."""
    value = {"none": 0.0, "zero": 0.0, "used": 0.25}[bias]
    vector = torch.full((32,), value)
    tensors = dict(head.state_dict())
    if bias != "none":
        tensors["fc.bias"] = vector
    if copy:
        tensors["embed_tokens.weight"] = embeddings
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    return publish(folder, tensors, bias=bias != "none"), vector


@pytest.mark.parametrize(
    ("bias", "copy", "prefix"),
    list(itertools.product(["none", "zero", "used"], [False, True], ["", "model."])),
)
def test_a_published_head_computes_what_its_tensors_say(
    tmp_path, head, target, embeddings, bias, copy, prefix
):
    layout = {"bias": bias, "copy": copy, "prefix": prefix}
    folder, vector = published(tmp_path / "head", head, embeddings, **layout)

    read, record = load_head_folder(folder, target)

    inputs = torch.randn(2, 40, 32)
    expected = head.state_dict()["fc.weight"] @ torch.cat(list(inputs), dim=-1).T
    assert_close(read.fuse(*inputs), expected.T + vector, rtol=1e-5, atol=1e-5)
    if bias != "used":
        assert_close(read(*inputs, [25, 15]), head(*inputs, [25, 15]), rtol=0, atol=0)
        assert read.fc.bias is None
    else:
        assert not torch.allclose(read(*inputs, [25, 15]), head(*inputs, [25, 15]), atol=1e-2)
    assert record["published"] and record["fingerprint"]["model_type"] == "llama"


@pytest.mark.parametrize("bias", ["zero", "used"])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "eagle"])
def test_a_published_head_is_exported_again_with_the_bias_that_it_has(
    tmp_path, head, target, embeddings, engine, bias
):
    folder, vector = published(tmp_path / "head", head, embeddings, bias=bias, copy=True, prefix="")
    config = ExportConfig(
        checkpoint=str(folder), engine=engine, target=target, out=str(tmp_path / "out")
    )
    if engine == "vllm" and bias == "used":
        with pytest.raises(ValueError, match=r"fc.bias that is not zero .*engine=sglang or"):
            export(config)
        assert not (tmp_path / "out").exists()
        return

    out = export(config)

    again, record = load_exported(out)
    inputs = torch.randn(2, 40, 32)
    assert torch.equal(
        again(*inputs, [25, 15]), load_head_folder(folder, target)[0](*inputs, [25, 15])
    )
    assert record["published"] and record["source"] == str(folder)
    card = (out / "README.md").read_text()
    assert "A published head" in card and "None" not in card
    if engine == "sglang":
        assert torch.equal(load_file(out / "model.safetensors")["fc.bias"], vector)
    if engine == "eagle":
        assert json.loads((out / "config.json").read_text())["bias"] is (bias == "used")


@pytest.mark.parametrize("engine", ["vllm", "sglang", "eagle"])
def test_every_export_is_read_again_bit_for_bit_to_train_on_and_to_export(
    run_path, target, head, embeddings, tmp_path, engine
):
    out = export(ExportConfig(checkpoint=str(run_path), engine=engine, out=str(tmp_path / "a")))
    stored = load_file(run_path / "steps" / "000020" / "head.safetensors")
    read, record = load_head_folder(out, target)
    tensors = read_head(str(out), head.config, embed_tokens=embeddings, known=record["fingerprint"])
    for name, tensor in stored.items():
        assert torch.equal(read.state_dict()[name], tensor) and torch.equal(tensors[name], tensor)
    back = export(ExportConfig(checkpoint=str(out), engine="vllm", out=str(tmp_path / "b")))
    direct = export(ExportConfig(checkpoint=str(run_path), out=str(tmp_path / "c")))
    for name in ("model.safetensors", "config.json"):
        assert (back / name).read_bytes() == (direct / name).read_bytes()
    assert load_exported(back)[1]["step"] == 20


def test_a_published_head_needs_to_be_told_whose_it_is(tmp_path, head, embeddings):
    folder, _ = published(tmp_path / "head", head, embeddings, bias="none", copy=False, prefix="")
    with pytest.raises(ValueError, match=r"nothing says which target its head is for.*target=..."):
        export(ExportConfig(checkpoint=str(folder)))


def test_a_head_of_another_size_is_refused_with_all_that_does_not_fit(
    tmp_path, head, embeddings, target
):
    tensors = dict(head.state_dict())
    del tensors["fc.weight"]
    folder = publish(tmp_path / "head", tensors, vocab_size=100, num_hidden_layers=2)
    with pytest.raises(
        ValueError, match=r"(?s)vocab_size 100.*layers 2.*fc.weight is missing.*chec"
    ):
        load_head_folder(folder, target)


def test_embeddings_of_its_own_are_counted_in_a_warning(tmp_path, head, embeddings, target, caplog):
    caplog.set_level(logging.INFO, logger="train")
    own = embeddings.clone()
    own[[5, 7]] += 0.5
    folder = publish(tmp_path / "own", {**head.state_dict(), "embed_tokens.weight": own})
    load_head_folder(folder, target)
    assert "2 of 259 rows differ from the target's" in caplog.text


def test_a_folder_in_the_hubs_cache_is_found_by_its_id_without_network(
    run_path, target_path, tmp_path, monkeypatch
):
    """The layout that `hf download` leaves: refs/main names a folder below snapshots."""

    def cached(name: str, source: Path) -> None:
        repo = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        shutil.copytree(source, repo / "snapshots" / "0123abc")
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text("0123abc")

    cached("org/target", target_path)
    cached("org/head", export(ExportConfig(checkpoint=str(run_path), out=str(tmp_path / "out"))))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    read, record = load_head_folder("org/head", TargetConfig(path="org/target"))
    assert record["step"] == 20 and read.config.hidden_size == 32
    with pytest.raises(FileNotFoundError, match="no folder org/absent, and the hub gives no such"):
        head_folder("org/absent")


def test_a_name_that_is_no_hub_id_is_taken_for_a_missing_folder():
    with pytest.raises(FileNotFoundError, match=r"There is no folder \./gone"):
        head_folder("./gone")


def test_a_push_without_a_token_says_how_to_get_one_and_keeps_the_export(
    run_path, tmp_path, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.utils.get_token", lambda: None)
    config = ExportConfig(
        checkpoint=str(run_path), out=str(tmp_path / "out"), push_to_hub="org/name"
    )
    with pytest.raises(RuntimeError, match=r"push_to_hub=org/name needs a token.*hf auth login"):
        export(config)
    assert load_exported(tmp_path / "out")[1]["step"] == 20


def test_a_push_without_a_connection_says_so(run_path, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils.get_token", lambda: "hf_none")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.hf_api.HfApi.create_repo", _no_connection)
    config = ExportConfig(
        checkpoint=str(run_path), out=str(tmp_path / "out"), push_to_hub="org/name"
    )
    with pytest.raises(RuntimeError, match=r"(?s)org/name failed: .*refused.*connection"):
        export(config)


def _no_connection(*_, **__):
    from huggingface_hub.errors import HTTPError

    raise HTTPError("Connection refused")
