"""What can only be seen on a CUDA GPU: the same results there, also in bfloat16."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from data.config import TargetConfig
from data.targets.model import TargetHead, check_output_head, load_target
from tests.tiny import save_tiny_target, tiny_llama_config
from tests.training import losses
from train.config import HeldoutConfig, TrainConfig
from train.fit.loop import fit
from train.fit.loss import distillation_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_the_cpus(dtype):
    torch.manual_seed(0)
    weight = torch.randn(5000, 64).to(dtype)
    predicted = torch.randn(3000, 64, requires_grad=True)
    features = torch.randn(3000, 64)

    def loss_and_gradient(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        matrix = weight.to(device)
        here = predicted.detach().to(device).requires_grad_()
        loss = distillation_loss(
            here, features.to(device), TargetHead(matrix, matrix), l1_weight=1.0, ce_weight=0.1
        ).loss
        return loss.detach().cpu(), torch.autograd.grad(loss, here)[0].cpu()

    tolerance = 1e-3 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(loss_and_gradient("cuda"), loss_and_gradient("cpu"), strict=True):
        assert_close(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


def test_training_on_the_gpu_lowers_the_loss_and_resumes(cache_path, tmp_path):
    config = TrainConfig(
        features=str(cache_path),
        out=str(tmp_path / "run"),
        max_steps=20,
        batch_tokens=1000,
        lr=3e-3,
        save_every=10,
        heldout=HeldoutConfig(share=0.2),
    )
    fit(config)
    first, last = losses(config.out)[0], losses(config.out)[-1]
    assert last[1] < 0.95 * first[1]
    for file in (tmp_path / "run" / "steps" / "000020").glob("checkpoint.json"):
        file.unlink()
    fit(replace(config, log_every=1))
    assert losses(config.out)[-1] == pytest.approx(last, rel=1e-2)


@pytest.fixture(scope="module")
def deep_target(tmp_path_factory) -> str:
    """A tiny target of enough layers to be cut."""
    config = tiny_llama_config(num_hidden_layers=8, tie_word_embeddings=False)
    return str(save_tiny_target(tmp_path_factory.mktemp("deep"), config))


def assert_same_features(config: TargetConfig, *, places: set[str]) -> None:
    """A spread target gives, on the first GPU, what one on the CPU gives."""
    input_ids = torch.arange(60).reshape(2, 30)
    expected = load_target(TargetConfig(path=config.path, device="cpu")).features(input_ids)
    target = load_target(config)
    assert {str(place) for place in target.model.hf_device_map.values()} == places
    features = target.features(input_ids.to(target.device))
    assert features.device == target.head.weight.device == torch.device("cuda", 0)
    assert_close(features.cpu(), expected, rtol=1e-3, atol=1e-3)
    check_output_head(target, input_ids)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_a_target_over_two_gpus_gives_the_same_features(deep_target):
    config = TargetConfig(path=deep_target, device_map="balanced")
    assert_same_features(config, places={"0", "1"})


def test_what_does_not_fit_into_the_gpu_waits_in_memory(deep_target, monkeypatch, caplog):
    """Nearly all of the GPU looks taken, so that Accelerate leaves most layers to the host."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (150_000, 10**9))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = TargetConfig(path=deep_target, device_map="sequential")
    assert_same_features(config, places={"0", "cpu"})
    assert "are copied to the GPU for every batch" in caplog.text
