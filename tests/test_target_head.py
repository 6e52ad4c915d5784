"""The target's two matrices, read from every form of checkpoint, whole and quantised."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from data.cache.reader import FeatureCache
from data.config import DatasetConfig, DumpConfig, TargetConfig
from data.dump.run import dump
from data.targets.model import check_output_head, fingerprint_differences
from tests.gguf_files import save_gguf
from tests.targets import assert_same_head, load, read
from tests.tiny import save_tiny_target, tiny_llama_config, tiny_tokenizer


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("form", ["single", "sharded", "bin"])
def test_the_head_is_read_from_every_form_of_checkpoint(tied, form, tmp_path):
    folder = tmp_path / "target"
    shards = {"max_shard_size": "20kB"} if form == "sharded" else {}
    save_tiny_target(folder, tiny_llama_config(tie_word_embeddings=tied), **shards)
    if form == "sharded":
        assert (folder / "model.safetensors.index.json").is_file()
    if form == "bin":
        state = load_file(folder / "model.safetensors")
        torch.save(state, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()

    target = load(folder)
    assert_same_head(read(folder), target)
    assert (target.head.weight is target.head.embed_tokens) == tied


def test_a_wrong_tie_flag_is_read_as_the_model_reads_it(tmp_path):
    """Tied by the config, but the file holds two different matrices: they are not tied."""
    save_tiny_target(tmp_path, tiny_llama_config(tie_word_embeddings=False))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))

    target = load(tmp_path)
    assert target.head.weight is not target.head.embed_tokens
    assert_same_head(read(tmp_path), target)


def test_a_missing_output_matrix_is_an_error_that_lists_the_names_tried(tmp_path):
    save_tiny_target(tmp_path, tiny_llama_config(tie_word_embeddings=True))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))

    with pytest.raises(ValueError, match=r"no tensor lm_head.weight, language_model.*is False"):
        read(tmp_path)
    with pytest.raises(ValueError, match=r"would start at random values: lm_head.weight"):
        load(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_is_the_target_that_it_was_made_from(tied, tmp_path):
    whole = save_tiny_target(tmp_path / "whole", tiny_llama_config(tie_word_embeddings=tied))
    file = save_gguf(whole, tmp_path / "tiny.gguf", "F32")
    target, original = load(file), load(whole)
    input_ids = torch.arange(40).reshape(2, 20)

    assert torch.equal(target.features(input_ids), original.features(input_ids))
    assert_same_head(read(file), target)
    assert torch.equal(read(file).weight, original.head.weight)
    text = "What? <|im_start|> Ü"
    assert target.tokenizer.encode(text) == original.tokenizer.encode(text)


def test_a_quantised_gguf_file_is_dequantised_alike_for_dump_and_training(target_path, tmp_path):
    file = save_gguf(target_path, tmp_path / "tiny.gguf", "Q8_0")
    target = load(file)
    check_output_head(target, torch.arange(40).reshape(2, 20))
    assert_same_head(read(file), target)
    assert not torch.equal(read(file).weight, read(target_path).weight)


def test_the_pair_of_matrices_stays_one_when_moved(target_path):
    head = read(target_path).to(torch.bfloat16)
    assert head.weight is head.embed_tokens


def save_quantised(folder: Path, bits: int, **settings) -> tuple[Path, Path]:
    """A tiny target and its copy that bitsandbytes has quantised."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    config = tiny_llama_config(  # its CPU kernels want widths that 32 divides
        hidden_size=64, intermediate_size=128, head_dim=16, tie_word_embeddings=False
    )
    whole = save_tiny_target(folder / "whole", config)
    quantisation = BitsAndBytesConfig(
        load_in_8bit=bits == 8, load_in_4bit=bits == 4, bnb_4bit_quant_type="nf4", **settings
    )
    model = AutoModelForCausalLM.from_pretrained(
        whole, quantization_config=quantisation, dtype=torch.float32, device_map={"": "cpu"}
    )
    model.save_pretrained(folder / "quantised")
    tiny_tokenizer().save_pretrained(folder / "quantised")
    return whole, folder / "quantised"


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_target_is_dumped_like_any_other(bits, chats_path, tmp_path):
    whole, quantised = save_quantised(tmp_path, bits)
    target = load(quantised)
    check_output_head(target, torch.arange(40).reshape(2, 20))
    assert_same_head(read(quantised), target)
    assert torch.equal(read(quantised).weight, read(whole).weight)

    def dumped(path: Path) -> FeatureCache:
        config = DumpConfig(
            target=TargetConfig(path=str(path), device="cpu"),
            dataset=DatasetConfig(path=str(chats_path)),
            out=str(tmp_path / f"{path.name}-features"),
        )
        return FeatureCache(dump(config))

    ours, theirs = dumped(quantised), dumped(whole)
    differences = fingerprint_differences(ours.fingerprint, theirs.fingerprint)
    assert differences[0].startswith(f"quantization: bitsandbytes {bits}-bit here, none there")
    features, others = ours.sequence(0).features.float(), theirs.sequence(0).features.float()
    assert features.isfinite().all()
    distance = float((features - others).norm() / others.norm())
    assert 0.001 < distance < 0.5  # another model's, but a copy of the same


def test_a_target_whose_output_head_is_quantised_is_refused_in_both_ways(tmp_path):
    _, quantised = save_quantised(tmp_path, 8, llm_int8_skip_modules=["no_such_module"])
    with pytest.raises(ValueError, match=r"output head is a Linear8bitLt .*int8: it is quantised"):
        load(quantised)
    with pytest.raises(ValueError, match=r"lm_head.weight of .* stored as torch.int8: it is quan"):
        read(quantised)


def change_head(folder: Path, change: dict[str, torch.Tensor], *, tied: bool = False) -> Path:
    """A tiny target in whose file `change` stands for the output head."""
    save_tiny_target(folder, tiny_llama_config(tie_word_embeddings=tied))
    state = load_file(folder / "model.safetensors")
    state.pop("lm_head.weight", None)
    save_file({**state, **change}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


PACKED = {"qweight": torch.zeros(4, 259, dtype=torch.int32), "scales": torch.ones(1, 259)}


@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_output_head_is_named_and_never_replaced_by_the_embedding(tied, tmp_path):
    """Tied by the config, an absent lm_head.weight is the embedding; a packed one is not absent."""
    packed = {f"lm_head.{name}": tensor for name, tensor in PACKED.items()}
    folder = change_head(tmp_path, packed, tied=tied)
    with pytest.raises(ValueError, match=r"has no lm_head.weight, but lm_head.qweight, lm_head.sc"):
        read(folder)


def test_eight_bit_floats_are_no_numbers_without_their_scale(tmp_path):
    """They convert to any dtype without an error, to a matrix that means nothing."""
    matrix = torch.randn(259, 32).to(torch.float8_e4m3fn)
    folder = change_head(
        tmp_path, {"lm_head.weight": matrix, "lm_head.weight_scale": torch.ones(1)}
    )
    with pytest.raises(ValueError, match=r"float8_e4m3fn: it is quantised.*leave both out"):
        read(folder)
