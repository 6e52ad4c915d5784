import pytest
import torch

from tests.heads import random_prompts, trained_head
from train.decode import plain_generate
from train.measure.ranks import UNKNOWN, Ranks, measure_ranks

NEW = 16


@pytest.fixture(scope="module")
def answers(tiny_target_and_head):
    target, _ = tiny_target_and_head
    prompts = random_prompts(target, [5, 9, 7])
    return [
        (ids.tolist(), plain_generate(target, ids, max_new_tokens=NEW, stop_ids=()).tokens)
        for ids in prompts
    ]


def followed(target, head, prompt: list[int], answer: list[int], start: int, steps: int):
    """Guesses of the head from one place, one forward after the other over all pairs so far."""
    ids = torch.tensor(prompt + answer)
    last = len(prompt) + start
    features = target.features(ids[None])[0][:last]
    guesses = []
    for step in range(min(steps, len(answer) - start - 1)):
        tokens = ids[1 : last + 1 + step]
        predicted = head(target.head.embed(tokens), features, [len(tokens)])
        guesses.append(target.head.logits(predicted[-1]))
        features = torch.cat([features, predicted[-1:]])
    return guesses


@torch.no_grad()
def test_ranks_are_those_of_drafting_from_each_place(tiny_target_and_head, answers):
    target, head = tiny_target_and_head
    steps, topk = 3, 5
    ranks = measure_ranks(target, head, answers, num_steps=steps, topk=topk).ranks
    assert len(ranks) == sum(len(answer) - 1 for _, answer in answers)
    row = 0
    for prompt, answer in answers:
        for start in range(len(answer) - 1):
            guesses = followed(target, head, prompt, answer, start, steps)
            for step in range(steps):
                if start + step + 1 >= len(answer):
                    assert ranks[row, step] == UNKNOWN
                    continue
                logits = guesses[step]
                rank = int((logits > logits[answer[start + step + 1]]).sum())
                assert ranks[row, step] == min(rank, topk)
            row += 1


def test_rates_count_only_paths_that_a_tree_can_hold():
    ranks = Ranks(
        torch.tensor(
            [
                [0, 0, 1],
                [0, 2, 0],  # lost at depth 2: its depth 3 does not count
                [1, 0, UNKNOWN],
                [2, 0, 0],  # lost at once
                [0, UNKNOWN, UNKNOWN],
            ]
        ),
        topk=2,
    )
    assert ranks.tried == [5, 3, 1]
    assert ranks.rates == [[3 / 5, 1 / 5], [2 / 3, 0.0], [0.0, 1.0]]


def test_answers_of_one_token_say_nothing(tiny_target_and_head):
    target, head = tiny_target_and_head
    with pytest.raises(ValueError, match="one token long"):
        measure_ranks(target, head, [([5, 6], [7])], num_steps=2, topk=2)


def test_a_trained_head_guesses_better_than_a_random_one(tiny_target_and_head, answers):
    target, head = tiny_target_and_head
    fitted = trained_head(target, [torch.tensor(prompt) for prompt, _ in answers], steps=100)
    rates = [
        measure_ranks(target, one, answers, num_steps=1, topk=3).rates[0][0]
        for one in (head, fitted)
    ]
    assert rates[1] > rates[0] + 0.3
