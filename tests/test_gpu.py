"""What can only be seen on a CUDA GPU: the same results there, also in bfloat16."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from data.target import TargetHead
from tests.test_train import losses
from train.config import HeldoutConfig, TrainConfig
from train.loop import fit
from train.loss import distillation_loss

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
