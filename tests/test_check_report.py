from train.serve.check_report import advice, first_difference


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
        "ours": {"acceptance_length": 1.5, "tried": [1000]},
        "prompts": ["1"] * 20,
    }
