"""What an engine would load silently as another network is named when a folder is read back."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from train.config import ExportConfig
from train.head import DraftHead
from train.serve.export import compare, export, load_exported


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop("fc.weight"), r"fc\.weight is missing"),
        (lambda t: t.update({"norm.weight": torch.ones(32)}), r"norm\.weight does not belong"),
        (lambda t: t.update({"fc.bias": torch.zeros(32)}), r"fc\.bias does not belong"),
        (lambda t: t.update({"fc.weight": torch.ones(32, 32)}), r"fc\.weight is \[32, 32\]"),
        (lambda t: t["fc.weight"].fill_(float("nan")), r"fc\.weight holds values"),
        (lambda t: t.update({"fc.weight": t["fc.weight"].half()}), r"fc\.weight is float16"),
    ],
)
def test_what_engines_would_load_silently_is_named(run_path, tmp_path, damage, message):
    out = export(ExportConfig(checkpoint=str(run_path), out=f"{tmp_path}/out"))
    tensors = load_file(out / "model.safetensors")
    damage(tensors)
    save_file(tensors, out / "model.safetensors")

    with pytest.raises(ValueError, match=message):
        load_exported(out)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_hidden_layers", None, "no num_hidden_layers"),
        ("bias", True, "bias True, expected False"),
        ("tie_word_embeddings", True, "tie_word_embeddings True"),
        ("rope_theta", None, "no rope_theta"),
    ],
)
def test_config_keys_that_engines_would_misread_are_named(run_path, tmp_path, key, value, message):
    out = export(ExportConfig(checkpoint=str(run_path), out=f"{tmp_path}/out"))
    keys = json.loads((out / "config.json").read_text())
    keys[key] = value
    (out / "config.json").write_text(json.dumps({k: v for k, v in keys.items() if v is not None}))

    with pytest.raises(ValueError, match=message):
        load_exported(out)


def test_a_second_weights_file_is_refused(run_path, tmp_path):
    out = export(ExportConfig(checkpoint=str(run_path), out=f"{tmp_path}/out"))
    save_file({"fc.weight": torch.zeros(32, 64)}, out / "stale.safetensors")

    with pytest.raises(ValueError, match=r"exactly one weights file.*stale\.safetensors"):
        load_exported(out)


def test_compare_notices_swapped_halves_and_changed_rope(run_path, tmp_path):
    out = export(ExportConfig(checkpoint=str(run_path), out=f"{tmp_path}/out"))
    head, _ = load_exported(out)

    swapped = DraftHead(head.config)
    swapped.load_state_dict(head.state_dict())
    swapped.fc.weight.data = swapped.fc.weight.data.roll(32, dims=1)
    with pytest.raises(RuntimeError, match=r"fc\.weight in .* is not the trained tensor"):
        compare(swapped, out)

    keys = json.loads((out / "config.json").read_text())
    keys["rope_parameters"]["rope_theta"] = keys["rope_theta"] = 1e5
    (out / "config.json").write_text(json.dumps(keys))
    with pytest.raises(RuntimeError, match="RoPE settings"):
        compare(head, out)
