from pytest import approx

from train.check_report import Acceptance, advice, first_difference


def test_rates_are_conditional_and_length_counts_the_bonus_token():
    """10 rounds, of which 6 accepted draft token 1, 3 also token 2, none token 3."""
    counted = Acceptance(drafts=10, accepted_per_step=[6, 3, 0])

    assert counted.rates == [0.6, 0.5, 0.0]
    assert counted.length == approx(1 + (6 + 3 + 0) / 10)
    assert counted.length == approx(1 + 0.6 + 0.6 * 0.5)


def test_a_chain_that_was_never_tried_has_rate_zero():
    assert Acceptance(drafts=0, accepted_per_step=[0, 0]).rates == [0.0, 0.0]
    assert Acceptance(drafts=0, accepted_per_step=[0, 0]).length == 1.0


def test_the_first_difference_is_a_token_or_an_early_end():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [7]) == 0


def test_differing_outputs_are_near_ties_or_a_fault_but_never_nothing():
    assert "near-tie" in advice(_report(differences=[{"near_tie": True}]))[0]
    assert "a fault" in advice(_report(differences=[{"near_tie": True}, {"near_tie": False}]))[0]
    # One answer ended early: there are no two tokens whose logits could tie.
    assert "a fault" in advice(_report(differences=[{}]))[0]


def test_less_acceptance_than_ours_points_at_the_head_that_the_engine_built():
    assert any("accepts less" in line for line in advice(_report(engine_length=1.0)))
    assert not any("accepts less" in line for line in advice(_report(engine_length=2.0)))
    assert advice(_report()) == []


def _report(*, differences: list[dict] | None = None, engine_length: float = 1.5) -> dict:
    return {
        "outputs_equal": not differences,
        "differences": differences or [],
        "acceptance_close": engine_length == 1.5,
        "engine": {"acceptance_length": engine_length},
        "ours": {"acceptance_length": 1.5, "drafts": 1000},
        "prompts": ["1"] * 20,
    }
