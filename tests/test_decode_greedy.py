"""With any tree, any batch and any target: the answer is that of plain decoding."""

from functools import partial

import pytest
from torch import Tensor

from data.config import TargetConfig
from data.targets.model import Target, load_target
from tests.decoding import DRAFTINGS, path_tokens
from tests.heads import random_prompts, trained_head
from train.decode import Drafting, Generation, plain_generate, speculative_generate, stop_ids_of
from train.head import DraftHead

NEW = 16
RANKED = Drafting.dynamic(num_steps=4, topk=4, num_draft_tokens=16, ancestors="rank")
KINDS = {**DRAFTINGS, "dynamic, ancestors by rank": RANKED}


@pytest.fixture(scope="module")
def target(target_path) -> Target:
    return load_target(TargetConfig(path=str(target_path), dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def prompts(target) -> list[Tensor]:
    return random_prompts(target, [1, 2, 3, 5, 8, 13, 21, 34] * 8)


@pytest.fixture(scope="module")
def head(target, prompts) -> DraftHead:
    return trained_head(target, prompts[:24])


@pytest.fixture(scope="module")
def plain(target, prompts) -> list[list[int]]:
    return [answer_of(target, prompt) for prompt in prompts]


def answer_of(target: Target, prompt: Tensor, *, stop_ids=(), new: int = NEW) -> list[int]:
    return plain_generate(target, prompt, max_new_tokens=new, stop_ids=stop_ids).tokens


def in_batches(generate, prompts: list[Tensor], size: int) -> list[Generation]:
    if size == 1:
        return [generate(input_ids=prompt) for prompt in prompts]
    found = []
    for start in range(0, len(prompts), size):
        found += generate(input_ids=prompts[start : start + size])
    return found


@pytest.mark.parametrize(("size", "count"), [(1, 16), (4, 64), (64, 64)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_tree_changes_a_token_of_64_prompts(target, head, prompts, plain, kind, size, count):
    generate = partial(
        speculative_generate, target, head, drafting=KINDS[kind], max_new_tokens=NEW, stop_ids=()
    )
    generations = in_batches(generate, prompts[-count:], size)
    assert [generation.tokens for generation in generations] == plain[-count:]
    # Rounds of all kinds were seen: nothing, a part, and a whole path accepted.
    seen = {accepted for generation in generations for accepted in generation.accepted}
    assert seen >= ({0, 1} if count < 64 else set(range(KINDS[kind].num_steps + 1)))


def test_a_tree_accepts_more_than_its_chain(target, head, prompts):
    """It holds the chain and more, so in each first round it accepts at least as much."""
    generate = partial(speculative_generate, target, head, max_new_tokens=NEW, stop_ids=())
    firsts = {
        kind: [g.accepted[0] for g in generate(prompts, drafting=drafting)]
        for kind, drafting in (
            ("chain", Drafting.chain(3)),
            ("tree", Drafting.static([[0], [0, 0], [0, 0, 0], [1], [0, 1], [2]])),
        )
    }
    assert all(t >= c for t, c in zip(firsts["tree"], firsts["chain"], strict=True))
    assert sum(firsts["tree"]) > sum(firsts["chain"])


@pytest.mark.parametrize("size", [2, 64])
def test_plain_decoding_of_a_batch_is_that_of_each_prompt(target, prompts, plain, size):
    generate = partial(plain_generate, target, max_new_tokens=NEW, stop_ids=())
    assert [g.tokens for g in in_batches(generate, prompts, size)] == plain


# --- where answers end --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_answers_of_a_batch_end_each_at_its_own_stop_token(target, head, prompts, plain, kind):
    """Sequences leave the batch one by one, and the others go on undisturbed."""
    stop_ids = {plain[0][3], plain[5][9], plain[11][0]}
    expected = [answer_of(target, prompt, stop_ids=stop_ids) for prompt in prompts[:16]]
    assert len({len(tokens) for tokens in expected}) > 3
    generations = speculative_generate(
        target,
        head,
        prompts[:16],
        drafting=KINDS[kind],
        max_new_tokens=NEW,
        stop_ids=stop_ids,
    )
    assert [generation.tokens for generation in generations] == expected


@pytest.mark.parametrize("kind", DRAFTINGS)
@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_stop_string_ends_an_answer_where_it_ends_plain_decoding(
    target, head, prompts, kind, length
):
    """A string that is spelled by several tokens, which a round may accept in one go."""
    for prompt in prompts[3:9]:
        tokens = answer_of(target, prompt)
        string = target.tokenizer.decode(tokens[6 : 6 + length])
        arguments = {"max_new_tokens": NEW, "stop_ids": (), "stop_strings": [string, "no such"]}
        expected = plain_generate(target, prompt, **arguments)
        text = target.tokenizer.decode(expected.tokens)
        assert string in text and string not in target.tokenizer.decode(expected.tokens[:-1])
        generation = speculative_generate(
            target, head, prompt, drafting=DRAFTINGS[kind], **arguments
        )
        assert generation.tokens == expected.tokens


@pytest.mark.parametrize("strings", ["word", [""]])
def test_stop_strings_that_would_stop_at_once_are_refused(target, prompts, strings):
    with pytest.raises(ValueError, match="expected a list of strings that are not empty"):
        plain_generate(target, prompts[0], max_new_tokens=4, stop_ids=(), stop_strings=strings)


# --- what is told about the rounds --------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_rounds_tell_the_answer_and_what_was_accepted(target, head, prompts, kind):
    drafting = KINDS[kind]
    for generation in speculative_generate(
        target, head, prompts[:6], drafting=drafting, max_new_tokens=NEW, stop_ids=(), record=True
    ):
        told = [generation.tokens[0]]
        for tree, count in zip(generation.rounds, generation.accepted, strict=True):
            assert tree.tokens[0] == told[-1] and tree.parents[0] == -1
            assert len(tree.tokens) == drafting.num_draft_tokens
            assert [tree.depths[p] + 1 for p in tree.parents[1:]] == tree.depths[1:]
            assert [tree.parents[n] for n in tree.path] == [0, *tree.path][: len(tree.path)]
            assert all(0 <= c <= 1 for c in tree.confidences) and tree.confidences[0] == 1
            assert len(tree.path) == count
            told += [*(tree.tokens[node] for node in tree.path), tree.bonus]
            children = [n for n, p in enumerate(tree.parents) if p == [0, *tree.path][-1]]
            assert tree.bonus not in {tree.tokens[n] for n in children}  # or it was no end
        assert told[:NEW] == generation.tokens
        last = generation.rounds[0]
        assert (
            path_tokens(last.tokens, last.parents, last.path[-1] if last.path else 0)
            == (told[1 : 1 + len(last.path)])
        )


def test_rounds_are_recorded_only_when_asked_for(target, head, prompts):
    generation = speculative_generate(
        target, head, prompts[0], drafting=Drafting.chain(2), max_new_tokens=4, stop_ids=()
    )
    assert generation.rounds == [] and generation.accepted


@pytest.mark.parametrize("kind", DRAFTINGS)
def test_a_reader_of_the_rounds_gets_the_answer_as_it_grows(target, head, prompts, kind):
    heard: list[tuple[list[int], int]] = []
    stop_ids = {answer_of(target, prompts[4])[9]}
    generation = speculative_generate(
        target,
        head,
        prompts[4],
        drafting=DRAFTINGS[kind],
        max_new_tokens=NEW,
        stop_ids=stop_ids,
        on_round=lambda tokens, accepted: heard.append((tokens, accepted)),
    )
    assert [token for tokens, _ in heard for token in tokens] == generation.tokens
    assert [accepted for _, accepted in heard] == [0, *generation.accepted]


def test_a_reader_of_the_rounds_follows_one_prompt(target, head, prompts):
    with pytest.raises(ValueError, match="follows one prompt, but 2 were given"):
        speculative_generate(
            target,
            head,
            prompts[:2],
            drafting=Drafting.chain(2),
            max_new_tokens=4,
            stop_ids=(),
            on_round=print,
        )


def test_no_prompt_is_refused(target):
    with pytest.raises(ValueError, match="No prompt was given"):
        plain_generate(target, [], max_new_tokens=4, stop_ids=stop_ids_of(target))
