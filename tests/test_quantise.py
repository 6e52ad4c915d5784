"""Features as int8: what rounding does to them, and to the distributions made of them."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from data.cache import calibration
from data.cache.calibration import storage_costs
from data.cache.quantise import Cost, channel_scales, dequantise, quantise
from data.targets.model import TargetHead


def loud_features(count: int = 300, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """[count, 64], two channels fifty times as loud as the others, as real targets have."""
    features = torch.randn(count, 64, generator=torch.Generator().manual_seed(0))
    features[:, [5, 40]] *= 50
    return features.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_read_lies_within_half_a_step(dtype):
    features = loud_features(dtype=dtype)
    channel_scale = channel_scales(features[:200])
    q, token_scale = quantise(features, channel_scale)
    read = dequantise(q, token_scale, channel_scale)

    assert q.dtype == torch.int8 and token_scale.dtype == read.dtype == torch.float32
    assert (q.int().abs().amax(dim=1) == 127).all()  # every row uses the whole range
    step = token_scale[:, None] * channel_scale
    assert ((read - features.float()).abs() <= 0.5001 * step).all()


def test_storing_what_was_read_changes_nothing():
    features = loud_features()
    channel_scale = channel_scales(features)
    stored = quantise(features, channel_scale)
    again = quantise(dequantise(*stored, channel_scale), channel_scale)
    assert torch.equal(again[0], stored[0])
    assert_close(again[1], stored[1], rtol=1e-6, atol=0)


def test_channel_scales_spare_the_quiet_channels():
    features = loud_features()
    quiet = torch.ones(64, dtype=torch.bool)
    quiet[[5, 40]] = False

    def error(channel_scale: Tensor) -> float:
        read = dequantise(*quantise(features, channel_scale), channel_scale)
        return float((read - features)[:, quiet].norm() / features[:, quiet].norm())

    assert error(channel_scales(features)) < 0.2 * error(torch.ones(64))


def test_a_row_of_zeros_is_read_as_zeros():
    features = loud_features(3)
    features[1] = 0
    channel_scale = channel_scales(features)
    q, token_scale = quantise(features, channel_scale)
    assert token_scale[1] == 0
    assert torch.equal(dequantise(q, token_scale, channel_scale)[1], torch.zeros(64))


def test_a_channel_silent_when_calibrated_may_speak_later():
    features = loud_features()
    features[:, 7] = 0
    channel_scale = channel_scales(features)
    assert channel_scale.isfinite().all() and (channel_scale >= 1).all()
    speaking = features.clone()
    speaking[:, 7] = 0.1
    read = dequantise(*quantise(speaking, channel_scale), channel_scale)
    assert_close(read[:, 7], speaking[:, 7], rtol=0.05, atol=0)
    silent = dequantise(*quantise(features, channel_scale), channel_scale)
    assert (read - speaking)[:, :7].norm() < 2 * (silent - features)[:, :7].norm()


def test_nothing_but_zeros_calibrates_to_ones():
    assert torch.equal(channel_scales(torch.zeros(4, 8)), torch.ones(8))


def test_no_feature_is_too_large():
    features = torch.full((2, 4), 3e38)
    features[:, 1:] = 1e-3
    channel_scale = channel_scales(features)
    read = dequantise(*quantise(features, channel_scale), channel_scale)
    assert_close(read[:, 0], features[:, 0])
    assert read.isfinite().all()


def test_costs_are_those_of_the_whole_distributions(monkeypatch):
    torch.manual_seed(0)
    weight = torch.randn(50, 16, dtype=torch.float64)
    head = TargetHead(weight, weight, soft_cap=20.0)
    features = torch.randn(70, 16, dtype=torch.float64)
    stored = features + 0.1 * torch.randn(70, 16, dtype=torch.float64)
    noise = dict(zip(map(tuple, features.tolist()), stored, strict=True))
    monkeypatch.setattr(calibration, "LOGIT_BYTES", 4 * 50 * 9)  # blocks of nine rows, one of seven

    ways = {
        "noisy": lambda rows: torch.stack([noise[tuple(row)] for row in rows.tolist()]),
        "same": lambda rows: rows,
    }
    costs = storage_costs(head, features, ways)

    theirs, ours = head.logits(features), head.logits(stored)
    kl = torch.nn.functional.kl_div(
        ours.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert costs["noisy"].kl == pytest.approx(float(kl), rel=5e-3)
    flips = (theirs.argmax(-1) != ours.argmax(-1)).double().mean()
    assert costs["noisy"].flips == pytest.approx(float(flips), rel=5e-3) and flips > 0
    error = (stored - features).norm() / features.norm()
    assert costs["noisy"].error == pytest.approx(float(error), rel=5e-3)
    assert costs["same"] == Cost(0, 0, 0)
