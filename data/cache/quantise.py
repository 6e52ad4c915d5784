"""Features as int8: `f ≈ q * channel_scale * token_scale`, with q from -127 to 127.

A few channels of a feature are up to twenty times as loud as most, and would get nearly all of the
255 steps if each token had one scale and no more. The channels' scales are measured once, for the
whole cache; a token's scale then fits its own row.

A channel's scale is its root mean square to the power 0.75. Chosen by the KL divergence between the
distributions that SmolLM2-135M's output head makes of a feature and of its stored form, on 4,096
tokens of chats that were not calibrated on (8,192 were):

    stored as                    bytes a token  error    KL       argmax changed
    bfloat16                     2H             .17 %    .00002    .2 %
    int8, a scale a token only    H + 4         2.8 %    .00418   3.2 %
    int8, absmax                  H + 4          .73 %   .00051   1.0 %
    int8, absmax^0.5 rms^0.5      H + 4          .72 %   .00041   1.0 %
    int8, rms                     H + 4          .82 %   .00046    .7 %
    int8, rms^0.9                 H + 4          .74 %   .00039    .9 %
    int8, rms^0.75                H + 4          .71 %   .00034    .6 %
    int8, rms^0.5                 H + 4          .90 %   .00055   1.0 %

(error: root mean square of the difference, as a share of the features'. The changed argmaxes are
25 to 50 tokens: their differences are noise, those of the KL are not.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 127
POWER = 0.75  # of a channel's root mean square
QUIETEST = 0.1  # of the median scale: a channel that was silent when measured may not stay so


@dataclass(frozen=True)
class Cost:
    """What storing features does to them and to the distributions that the output head makes."""

    kl: float  # nats: mean KL(from the feature || from what is stored of it)
    flips: float  # share of tokens whose argmax changes
    error: float  # root mean square of the difference, as a share of the features'

    def __str__(self) -> str:
        return (
            f"KL {self.kl:.5f}, {100 * self.flips:.2g} % of argmaxes changed, "
            f"error {100 * self.error:.2g} %"
        )


def channel_scales(features: Tensor) -> Tensor:
    """The scale of each channel, up to a common factor, which the tokens' scales take.

    features: [N, H]  finite
    returns   [H]     float32; the smallest is 1, so that dividing by them overflows nowhere
    """
    parts = [rows.double().square().sum(dim=0) for rows in features.split(1024)]
    scales = (torch.stack(parts).sum(dim=0) / len(features)).pow(POWER / 2)
    heard = scales[scales > 0]
    if not len(heard):
        return torch.ones(len(scales), dtype=torch.float32, device=features.device)
    scales = scales.clamp(min=float(QUIETEST * heard.median()))
    return (scales / scales.min()).float()


def quantise(features: Tensor, channel_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to int8.

    features:      [N, H]
    channel_scale: [H]  float32
    returns        q           [N, H] int8, -127 to 127
                   token_scale [N]    float32: its largest scaled entry is at 127; 0 for a row of 0
    """
    scaled = features.float() / channel_scale
    token_scale = scaled.abs().amax(dim=1) / LARGEST
    # Rounds to the scale that is stored, so that reading undoes exactly what was written.
    steps = scaled / token_scale.masked_fill(token_scale == 0, 1)[:, None]
    return steps.round().clamp(-LARGEST, LARGEST).to(torch.int8), token_scale


def dequantise(q: Tensor, token_scale: Tensor, channel_scale: Tensor) -> Tensor:
    """What `quantise` stored, as float32.

    q:             [N, H] int8
    token_scale:   [N]    float32
    channel_scale: [H]    float32
    returns        [N, H] float32
    """
    return q.float().mul_(token_scale[:, None]).mul_(channel_scale)
