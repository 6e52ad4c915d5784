import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from data.targets.model import TargetHead
from train.fit.loss import distillation_loss

H, V, N = 16, 50, 37
ROOT = Path(__file__).parent.parent
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler"
)


def make(dtype=torch.float64, **rules):
    torch.manual_seed(0)
    weight = torch.randn(V, H, dtype=dtype)
    head = TargetHead(weight, weight, **rules)
    predicted = torch.randn(N, H, dtype=dtype, requires_grad=True)
    return head, predicted, torch.randn(N, H, dtype=dtype)


def plain_loss(predicted, features, head, *, l1_weight, ce_weight):
    """The papers' formula, with all logits held."""
    target_probs = head.logits(features).softmax(-1)
    cross_entropy = F.cross_entropy(head.logits(predicted), target_probs, reduction="sum")
    smooth_l1 = F.smooth_l1_loss(predicted, features, reduction="sum") / H
    return l1_weight * smooth_l1 + ce_weight * cross_entropy


@pytest.mark.parametrize("rules", [{}, {"logit_scale": 0.25}, {"soft_cap": 3.0}])
@pytest.mark.parametrize("chunk_rows", [1, 10, 37, 512])
def test_chunked_loss_and_gradient_equal_the_plain_ones(rules, chunk_rows):
    head, predicted, features = make(**rules)
    weights = {"l1_weight": 0.7, "ce_weight": 0.3}

    chunked = distillation_loss(predicted, features, head, chunk_rows=chunk_rows, **weights).loss
    (chunked_gradient,) = torch.autograd.grad(chunked, predicted)
    plain = plain_loss(predicted, features, head, **weights)
    (plain_gradient,) = torch.autograd.grad(plain, predicted)

    assert_close(chunked, plain, rtol=1e-12, atol=1e-12)
    assert_close(chunked_gradient, plain_gradient, rtol=1e-10, atol=1e-12)


@needs_compiler
@pytest.mark.parametrize("rules", [{}, {"logit_scale": 0.25, "soft_cap": 3.0}])
def test_the_fused_loss_and_gradient_equal_the_plain_ones(rules):
    head, predicted, features = make(**rules)
    weights = {"l1_weight": 0.7, "ce_weight": 0.3}
    fused = distillation_loss(predicted, features, head, chunk_rows=10, fuse=True, **weights)
    plain = plain_loss(predicted, features, head, **weights)
    same = head.logits(predicted).argmax(-1) == head.logits(features).argmax(-1)

    assert_close(fused.loss, plain, rtol=1e-12, atol=1e-12)
    assert int(fused.agreed) == int(same.sum())
    assert_close(
        torch.autograd.grad(fused.loss, predicted)[0],
        torch.autograd.grad(plain, predicted)[0],
        rtol=1e-10,
        atol=1e-12,
    )


@pytest.mark.parametrize("rules", [{}, {"logit_scale": 0.25, "soft_cap": 3.0}])
@pytest.mark.parametrize("fuse", [False, pytest.param(True, marks=needs_compiler)])
def test_the_top_k_term_and_its_gradient_equal_the_plain_ones(rules, fuse):
    head, predicted, features = make(**rules)
    weights = {"l1_weight": 0.7, "ce_weight": 0.3}
    ours = distillation_loss(
        predicted, features, head, chunk_rows=10, top_k=4, top_k_weight=1.5, fuse=fuse, **weights
    )
    target_probs, best = head.logits(features).softmax(-1).sort(dim=-1, descending=True)
    log_probs = head.logits(predicted).log_softmax(-1).gather(-1, best[:, :4])
    term = -(target_probs[:, :4] * log_probs).sum()
    without = distillation_loss(predicted, features, head, **weights)
    plain = without.loss + 1.5 * term

    assert_close(ours.loss, plain, rtol=1e-12, atol=1e-12)
    assert_close(
        *(torch.autograd.grad(x, predicted)[0] for x in (ours.loss, plain)), rtol=1e-10, atol=1e-12
    )
    # What is logged stays comparable.
    assert_close(ours.cross_entropy, without.cross_entropy, rtol=1e-12, atol=1e-12)
    assert int(ours.agreed) == int(without.agreed)


def test_the_bias_of_an_output_head_counts():
    head, predicted, features = make(bias=torch.randn(V, dtype=torch.float64))
    loss = distillation_loss(predicted, features, head, l1_weight=1.0, ce_weight=1.0).loss
    assert_close(loss, plain_loss(predicted, features, head, l1_weight=1.0, ce_weight=1.0))


def test_a_restricted_vocabulary_renormalises_the_target_over_it():
    head, predicted, features = make(logit_scale=0.5)
    tokens = torch.tensor([7, 3, 30, 41])
    loss = distillation_loss(
        predicted, features, head.restricted(tokens), l1_weight=0.0, ce_weight=1.0
    ).loss
    target_probs = head.logits(features)[:, tokens].softmax(-1)
    log_probs = head.logits(predicted)[:, tokens].log_softmax(-1)
    assert_close(loss, -(target_probs * log_probs).sum())


def test_the_whole_vocabulary_in_any_order_is_the_plain_loss():
    head, predicted, features = make()
    weights = {"l1_weight": 0.0, "ce_weight": 1.0}
    shuffled = head.restricted(torch.randperm(V))
    assert_close(
        distillation_loss(predicted, features, shuffled, **weights).loss,
        plain_loss(predicted, features, head, **weights),
    )


def test_agreement_counts_equal_argmaxes():
    head, predicted, features = make(torch.float32)
    half = torch.cat([features[:10], predicted.detach()[10:]])
    sums = distillation_loss(predicted, half, head, l1_weight=1.0, ce_weight=0.1)
    same = head.logits(predicted).argmax(-1) == head.logits(half).argmax(-1)
    assert int(sums.agreed) == int(same.sum()) >= N - 10


def test_no_position_gives_zero_loss_and_zero_gradient():
    head, predicted, features = make(torch.float32)
    loss = distillation_loss(predicted[:0], features[:0], head, l1_weight=1.0, ce_weight=0.1).loss
    loss.backward()
    assert float(loss.detach()) == 0 and predicted.grad.eq(0).all()


def test_the_frozen_output_head_gets_no_gradient():
    head, predicted, features = make(torch.float32)
    distillation_loss(predicted, features, head, l1_weight=1.0, ce_weight=0.1).loss.backward()
    assert head.weight.grad is None and not list(head.parameters())


MEASURE_MEMORY = """
import torch
from data.memory import peak_resident
from data.targets.model import TargetHead
from train.fit.loss import distillation_loss

weight = torch.randn(32768, 8)
head = TargetHead(weight, weight)

def peak_megabytes(positions):
    predicted = torch.randn(positions, 8, requires_grad=True)
    features = torch.randn(positions, 8)
    distillation_loss(
        predicted, features, head, l1_weight=1.0, ce_weight=0.1, chunk_rows=64
    ).loss.backward()
    return peak_resident() / 2**20

peak_megabytes(64)
few = peak_megabytes(64)
many = peak_megabytes(4096)
held = torch.randn(4096, 32768)  # what a plain loss would hold, four times over
print(many - few, peak_resident() / 2**20 - few)
"""


def test_peak_memory_does_not_grow_with_positions_times_vocabulary():
    command = [sys.executable, "-c", MEASURE_MEMORY]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    growth, growth_of_one_matrix = map(float, result.stdout.split())
    assert growth_of_one_matrix > 200  # the measurement would see one [N, V], 512 MB
    assert growth < 40
