import pytest
import torch
from torch import Tensor

from data.config import TargetConfig
from data.targets.model import Target, load_target
from tests.heads import CheatingHead, random_head, random_prompts, trained_head
from train.decode import (
    Drafting,
    Generation,
    as_served,
    plain_generate,
    speculative_generate,
    stop_ids_of,
)
from train.head import DraftHead

NEW = 24


@pytest.fixture(scope="module")
def target(target_path) -> Target:
    return load_target(TargetConfig(path=str(target_path), dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def prompts(target) -> list[Tensor]:
    return random_prompts(target, [1, 1, 2, 3, 5, 8, 13, 21, 34, 40] * 2)


@pytest.fixture(scope="module")
def head(target, prompts) -> DraftHead:
    return trained_head(target, prompts[:12])


def generate(target, head, prompt, *, num_steps=3, max_new_tokens=NEW, stop_ids=()) -> Generation:
    return speculative_generate(
        target,
        head,
        prompt,
        drafting=Drafting.chain(num_steps),
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
    )


def plain(target, prompt, *, max_new_tokens=NEW, stop_ids=()) -> list[int]:
    return plain_generate(target, prompt, max_new_tokens=max_new_tokens, stop_ids=stop_ids).tokens


def cheat(target, prompt, wrong=frozenset()) -> CheatingHead:
    """A head that knows the answer to `prompt`; `wrong` counts from the prompt's last token."""
    text = torch.cat([prompt, torch.tensor(plain(target, prompt, max_new_tokens=2 * NEW))])
    return CheatingHead(target, text, {len(prompt) - 1 + i for i in wrong})


def accepted_without_caches(
    target: Target, head: DraftHead, prompt: Tensor, *, num_steps: int, max_new_tokens: int
) -> list[int]:
    """Rounds of the same chain, each computed from nothing: no cache of any kind."""
    text = prompt.tolist() + plain(target, prompt, max_new_tokens=1)
    accepted = []
    while len(text) < len(prompt) + max_new_tokens:
        features = target.features(torch.tensor([text[:-1]]))[0]
        pair_tokens = text[1:]
        drafted: list[int] = []
        for _ in range(num_steps):
            embeddings = target.head.embed(torch.tensor(pair_tokens))
            with torch.no_grad():
                output = head(embeddings, features, [len(features)])[-1:]
            drafted.append(int(target.head.logits(output).argmax()))
            features = torch.cat([features, output])
            pair_tokens = [*pair_tokens, drafted[-1]]
        count = 0
        while True:
            token = int(target.head.logits(target.features(torch.tensor([text]))[0, -1]).argmax())
            text.append(token)
            if count == num_steps or drafted[count] != token:
                break
            count += 1
        accepted.append(count)
    return accepted


def test_plain_decoding_is_what_transformers_generates(target, prompts):
    for prompt in prompts[:6]:
        theirs = target.model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            do_sample=False,
            max_new_tokens=NEW,
        )
        stop_ids = stop_ids_of(target)
        assert plain(target, prompt, stop_ids=stop_ids) == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5])
def test_a_trained_head_changes_no_token(target, head, prompts, num_steps):
    rounds = []
    for prompt in prompts:
        generation = generate(target, head, prompt, num_steps=num_steps)
        assert generation.tokens == plain(target, prompt)
        rounds += generation.accepted
    # Rounds of all kinds were seen: nothing, a part, and everything accepted.
    assert set(rounds) == set(range(num_steps + 1))


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5])
def test_a_random_head_changes_no_token(target, prompts, num_steps):
    for seed, prompt in enumerate(prompts[:10]):
        generation = generate(target, random_head(target, seed=seed), prompt, num_steps=num_steps)
        assert generation.tokens == plain(target, prompt)


@pytest.mark.parametrize("num_steps", [1, 3, 5])
def test_accepted_counts_are_those_of_drafting_without_any_cache(target, head, prompts, num_steps):
    for prompt in prompts[::3]:
        expected = accepted_without_caches(
            target, head, prompt, num_steps=num_steps, max_new_tokens=NEW
        )
        assert generate(target, head, prompt, num_steps=num_steps).accepted == expected


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_a_head_that_knows_the_answer_is_accepted_whole(target, prompts, num_steps):
    for prompt in prompts[:8]:
        generation = generate(target, cheat(target, prompt), prompt, num_steps=num_steps)
        assert generation.tokens == plain(target, prompt)
        assert set(generation.accepted) == {num_steps}
        # One token from the prefill, then K + 1 a round.
        assert len(generation.accepted) == -(-(NEW - 1) // (num_steps + 1))


def test_a_round_ends_at_the_first_wrong_draft(target, prompts):
    """The feature at index i after the prompt's last token gives answer token i."""
    prompt = prompts[5]
    generation = generate(target, cheat(target, prompt, wrong={2, 8}), prompt, max_new_tokens=13)
    # Token 0 comes from the prefill. Drafts 1 | 2 wrong: 1 accepted, 2 is the bonus token.
    # Then 3, 4, 5 and bonus 6; 7 | 8 wrong, bonus 8; 9, 10, 11 and bonus 12.
    assert generation.accepted == [1, 3, 1, 3]
    assert generation.tokens == plain(target, prompt, max_new_tokens=13)


@pytest.mark.parametrize("position", range(12))
def test_a_stop_token_ends_the_answer_wherever_it_falls_in_a_round(target, prompts, position):
    prompt = next(
        p for p in prompts if plain(target, p).index(plain(target, p)[position]) == position
    )
    stop = plain(target, prompt)[position]
    generation = generate(target, cheat(target, prompt), prompt, num_steps=5, stop_ids={stop})
    assert generation.tokens == plain(target, prompt, stop_ids={stop})
    assert generation.tokens[-1] == stop and len(generation.tokens) == position + 1
    # The last round counts whole: drafts behind the stop token were accepted, too.
    assert set(generation.accepted) <= {5}


@pytest.mark.parametrize("max_new_tokens", range(1, 14))
def test_the_answer_is_cut_at_max_new_tokens_and_the_round_counts_whole(
    target, prompts, max_new_tokens
):
    prompt = prompts[4]
    generation = generate(
        target, cheat(target, prompt), prompt, num_steps=4, max_new_tokens=max_new_tokens
    )
    assert generation.tokens == plain(target, prompt, max_new_tokens=max_new_tokens)
    assert len(generation.tokens) == max_new_tokens
    assert generation.accepted == [4] * -(-(max_new_tokens - 1) // 5)


def test_a_head_served_in_bfloat16_keeps_its_rope_frequencies(target, prompts):
    head = random_head(target)
    frequencies = head.rotary.inv_freq.clone()
    served = as_served(head, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert {p.dtype for p in served.parameters()} == {torch.bfloat16}
    assert torch.equal(served.rotary.inv_freq, frequencies)


def test_decoding_works_in_bfloat16(target_path, prompts):
    target = load_target(TargetConfig(path=str(target_path), dtype="bfloat16", device="cpu"))
    head = as_served(random_head(target), device=target.device, dtype=target.dtype)
    assert len(generate(target, head, prompts[3]).tokens) == NEW


def test_the_time_of_a_generation_adds_up(target, head, prompts):
    seconds = generate(target, head, prompts[8]).seconds
    parts = (seconds.prefill, seconds.draft, seconds.verify, seconds.other)
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(seconds.total)


@pytest.mark.parametrize("wrong", [{"num_steps": 0}, {"max_new_tokens": 0}])
def test_settings_below_one_are_refused(target, head, prompts, wrong):
    with pytest.raises(ValueError, match="at least 1"):
        generate(target, head, prompts[0], **wrong)


def test_an_empty_prompt_is_refused(target, head):
    with pytest.raises(ValueError, match="at least one token"):
        generate(target, head, torch.tensor([], dtype=torch.long))
