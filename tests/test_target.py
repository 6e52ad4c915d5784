"""Features of a target wherever its parts lie, and what is refused."""

import types

import accelerate
import psutil
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from data.config import TargetConfig
from data.targets.model import Target, check_launch, check_output_head, load_target
from data.targets.vllm_features import load_vllm_target
from tests.gguf_files import save_gguf
from tests.targets import assert_same_head, family_config, load, read
from tests.tiny import save_tiny_target


def test_the_attention_cap_of_gemma2_is_in_the_features(tmp_path):
    """PyTorch's fused attention, the default, leaves the cap out without a word."""
    folder = save_tiny_target(tmp_path, family_config("gemma2"))
    input_ids = torch.arange(20)[None] + 3
    with torch.no_grad():
        exact = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").model
        expected = exact(input_ids=input_ids).last_hidden_state

    assert_close(load(folder).features(input_ids), expected)


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config.json. Expected the folder"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"There is no folder"):
        read(tmp_path / "absent")
    save_tiny_target(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no weights. Looked for model.safetensors"):
        read(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "adapter_config.json")
    with pytest.raises(ValueError, match=r"holds an adapter, not a model. Merge it"):
        read(tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_head_has_the_dtype_of_the_target(dtype, target_path):
    target = load(target_path, dtype=dtype)
    assert target.head.weight.dtype == getattr(torch, dtype)
    assert_same_head(read(target_path, dtype=dtype), target)
    check_output_head(target, torch.arange(40).reshape(2, 20))
    with pytest.raises(ValueError, match=r"target.dtype is int8, expected auto, float32"):
        read(target_path, dtype="int8")


class BeforeTheNorm(Target):
    """A target whose features are taken one step too early."""

    def features(self, input_ids):
        states = []
        hook = self.model.model.norm.register_forward_hook(lambda _, args, __: states.append(args))
        with torch.no_grad():
            self.model.model(input_ids=input_ids)
        hook.remove()
        return states[0][0]


def test_features_before_the_final_norm_are_refused(target_path):
    target = BeforeTheNorm(**vars(load(target_path)))
    with pytest.raises(ValueError, match=r"differs from the target's own logits by up to"):
        check_output_head(target, torch.arange(20)[None])


def test_a_head_without_the_scale_of_its_family_is_refused(tmp_path):
    target = load(save_tiny_target(tmp_path, family_config("granite")))
    target.head.logit_scale = 1.0
    with pytest.raises(ValueError, match=r"differs from the target's own logits by up to"):
        check_output_head(target, torch.arange(20)[None])


class NamesTheLikeliest(Target):
    """A target that names the logits of a few tokens only, as an engine does."""

    def own_logits(self, input_ids):
        _, logits = super().own_logits(input_ids)
        best = logits.topk(20)
        return best.indices, best.values


@pytest.mark.parametrize("damage", ["none", "scale", "permuted", "unnamed"])
def test_the_check_works_on_the_likeliest_tokens_alone(damage, target_path):
    target = NamesTheLikeliest(**vars(load(target_path)))
    input_ids = torch.arange(20)[None]
    matrix = target.head.embed_tokens.clone()
    if damage == "scale":
        target.head.logit_scale = 1.1
    if damage == "permuted":
        target.head.embed_tokens = matrix.roll(1, dims=0)
    if damage == "unnamed":  # one token, likely in our eyes, that the target does not name
        tokens, _ = target.own_logits(input_ids)
        unnamed = next(token for token in range(259) if token not in tokens)
        matrix[unnamed] = 100 * target.features(input_ids)[0, 0]
        target.head.embed_tokens = matrix
    if damage == "none":
        check_output_head(target, input_ids)
        return
    with pytest.raises(ValueError, match=r"differs from the target's own logits by up to"):
        check_output_head(target, input_ids)


@pytest.mark.parametrize("device_map", ["auto", "balanced", "sequential"])
def test_a_spread_target_gives_the_same_features(device_map, target_path):
    spread = load_target(TargetConfig(path=str(target_path), device_map=device_map))
    whole = load_target(TargetConfig(path=str(target_path)))
    input_ids = torch.arange(40).reshape(2, 20).to(whole.device)
    assert_close(spread.features(input_ids), whole.features(input_ids))
    check_output_head(spread, input_ids)
    assert spread.features(input_ids).device == spread.head.weight.device


def test_a_target_whose_parts_wait_in_memory_gives_the_same_features(target_path):
    """As Accelerate leaves what does not fit into the GPUs: without weights between forwards."""
    whole = load(target_path)
    model = AutoModelForCausalLM.from_pretrained(target_path).eval()
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    target = Target(**{**vars(whole), "model": model, "head": read(target_path)})
    input_ids = torch.arange(40).reshape(2, 20)
    assert model.get_output_embeddings().weight.is_meta
    assert_close(target.features(input_ids), whole.features(input_ids))
    check_output_head(target, input_ids)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU would hold it")
def test_a_target_that_would_run_from_the_disk_is_refused(target_path, monkeypatch):
    memory = types.SimpleNamespace(available=60_000, total=60_000)  # bytes; the target has 80,000
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    with pytest.raises(ValueError, match=r"does not fit into the memory .*on disk\), and its wei"):
        load_target(TargetConfig(path=str(target_path), device_map="auto"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device_map": "auto", "device": "cuda:1"}, "device_map chooses the devices itself"),
        ({"engine": "vllm", "device": "cpu"}, "engine=vllm chooses the devices itself"),
        ({"engine": "vllm", "device_map": "auto"}, "with engine=vllm give target.tensor_parallel"),
        ({"tensor_parallel": 2}, "tensor_parallel=2 needs target.engine=vllm"),
        ({"engine": "vllm", "tensor_parallel": 0}, "tensor_parallel is 0, expected 1 or more"),
        ({"device_map": "disk"}, "expected one of null, auto, balanced, sequential"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TargetConfig(path="target", **settings)


@pytest.mark.parametrize("settings", [{"device_map": "auto"}, {"engine": "vllm"}])
def test_a_spread_target_wants_one_process(settings):
    config = TargetConfig(path="target", **settings)
    check_launch(config, 1)
    check_launch(TargetConfig(path="target"), 8)
    with pytest.raises(ValueError, match=r"but 2 processes were launched.*Start one process"):
        check_launch(config, 2)


def test_vllm_refuses_a_gguf_file(target_path, tmp_path):
    file = save_gguf(target_path, tmp_path / "tiny.gguf", "F32")
    config = TargetConfig(path=str(file), engine="vllm")
    with pytest.raises(ValueError, match=r"is a GGUF file. Use target.engine=transformers"):
        load_vllm_target(config, max_length=10, batch_tokens=10)
