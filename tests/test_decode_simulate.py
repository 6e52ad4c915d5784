import subprocess
import sys

import pytest

from train.config import SimulateConfig
from train.decode.simulate import expected_length, simulated_length

PROFILES = [
    ([1.0, 0.9, 0.7], 3.53),
    ([1.0, 0.9, 0.7, 0.6], 3.908),
    ([0.6] * 3, 2.176),
    ([0.6] * 4, 2.306),
]


@pytest.mark.parametrize(("alphas", "length"), PROFILES)
def test_played_rounds_are_as_long_as_the_formula_says(alphas, length):
    assert expected_length(alphas) == pytest.approx(length, abs=5e-4)
    # The mean of 50,000 rounds is off by 0.006 at most in one standard deviation.
    assert simulated_length(alphas, rounds=50_000) == pytest.approx(length, abs=0.02)


def test_the_command_prints_both():
    result = subprocess.run(
        [sys.executable, "-m", "scripts.simulate_acceptance", "alphas=[0.6,0.6,0.6]"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "2.176 tokens a round" in result.stdout and "50,000 rounds played" in result.stdout


@pytest.mark.parametrize("wrong", [{"alphas": []}, {"alphas": [1.2]}])
def test_what_is_no_share_is_refused(wrong):
    with pytest.raises(ValueError, match="shares from 0 to 1"):
        SimulateConfig(**wrong)
