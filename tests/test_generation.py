"""Batched generation: each row as if it were alone, and drawn from the target's distribution."""

import pytest
import torch
from transformers import Gemma2Config, GenerationConfig, MistralConfig

from data.chats.prompts import prompt_ids
from data.config import TargetConfig
from data.replies.generation import Request, generate, sample, stop_ids
from data.targets.model import load_target
from tests.talkative import save_talkative_target
from tests.tiny import save_tiny_target, tiny_chats, tiny_llama_config


def open_target(folder):
    return load_target(TargetConfig(path=str(folder), device="cpu"))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return open_target(save_talkative_target(tmp_path_factory.mktemp("talkative")))


@pytest.fixture(scope="module")
def requests(target):
    texts = [chat["conversations"][0]["value"] for chat in tiny_chats(12)]
    prompts = [prompt_ids(target.tokenizer, [{"role": "user", "content": text}]) for text in texts]
    assert len(set(map(len, prompts))) > 5
    return [Request(prompt, 40, seed) for seed, prompt in enumerate(prompts)]


def by_transformers(target, request: Request, stops) -> list[int]:
    """Greedy decoding of one prompt, as Transformers does it."""
    prompt = torch.tensor([request.prompt])
    settings = GenerationConfig(
        max_new_tokens=request.max_new_tokens, eos_token_id=sorted(stops), pad_token_id=0
    )
    mask = torch.ones_like(prompt)
    output = target.model.generate(prompt, attention_mask=mask, generation_config=settings)
    return output[0, prompt.shape[1] :].tolist()


def test_a_batch_of_any_prompts_equals_each_alone_in_transformers(target, requests):
    stops = stop_ids(target)
    replies = generate(target, requests, stop_ids=stops)
    assert replies == [by_transformers(target, request, stops) for request in requests]
    assert {reply[-1] for reply in replies} >= stops  # some end ...
    assert max(map(len, replies)) == 40  # ... and some are cut


def tiny_mistral():
    return MistralConfig(**vars_of(tiny_llama_config()), sliding_window=8)


def tiny_gemma2():
    return Gemma2Config(**vars_of(tiny_llama_config()), sliding_window=8, query_pre_attn_scalar=8)


def vars_of(config):
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
    names += ("num_attention_heads", "num_key_value_heads", "initializer_range")
    return {name: getattr(config, name) for name in names} | {"eos_token_id": 2, "bos_token_id": 1}


@pytest.mark.parametrize("make", [tiny_mistral, tiny_gemma2])
def test_windows_and_padding_do_not_disturb_each_other(make, tmp_path, requests):
    target = open_target(save_tiny_target(tmp_path / "target", make()))
    some = [Request(r.prompt, 20, 0) for r in requests[:4]]
    stops = stop_ids(target)
    expected = [by_transformers(target, request, stops) for request in some]
    assert generate(target, some, stop_ids=stops) == expected


def test_what_is_drawn_does_not_depend_on_the_batch(target, requests):
    settings = dict(stop_ids=stop_ids(target), temperature=0.9, top_p=0.95)
    together = generate(target, requests, **settings)
    backwards = generate(target, requests[::-1], **settings)[::-1]
    alone = [generate(target, [request], **settings)[0] for request in requests]
    assert together == backwards == alone
    others = [Request(r.prompt, r.max_new_tokens, r.seed + 100) for r in requests]
    assert generate(target, others, **settings) != together


def test_a_row_ends_at_its_own_limit(target, requests):
    limited = [Request(r.prompt, n, 0) for n, r in enumerate(requests, 1)]
    full = generate(target, requests, stop_ids=stop_ids(target))
    replies = generate(target, limited, stop_ids=stop_ids(target))
    assert replies == [reply[:n] for n, reply in enumerate(full, 1)]


def draw(logits: torch.Tensor, count: int, **settings) -> torch.Tensor:
    """Shares of the tokens over evenly spaced draws: exact to 1/count. logits: [V]"""
    draws = (torch.arange(count) + 0.5) / count
    tokens = sample(logits.expand(count, -1), draws, **settings)
    return torch.bincount(tokens, minlength=len(logits)) / count


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_tokens_are_drawn_from_the_softmax(temperature):
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 2
    shares = draw(logits, 20_000, temperature=temperature, top_p=1.0)
    expected = (logits / temperature).softmax(-1)
    assert (shares - expected).abs().max() <= 2 / 20_000


def test_top_p_draws_from_the_likeliest_tokens_that_hold_it():
    probs = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
    shares = draw(probs.log(), 10_000, temperature=1.0, top_p=0.6)
    assert shares.tolist() == pytest.approx([0, 4 / 7, 0, 3 / 7, 0], abs=2e-4)
    only_the_first = draw(probs.log(), 100, temperature=1.0, top_p=0.01)
    assert only_the_first.tolist() == [0, 1, 0, 0, 0]


def test_the_extreme_draws_give_tokens_that_can_be():
    logits = torch.full((1, 1000), -1e9)
    logits[0, [3, 7]] = torch.tensor([1.0, 0.0])
    for draw_, token in ((0.0, 7), (1 - 2**-24, 3)):
        got = sample(logits, torch.tensor([draw_]), temperature=1.0, top_p=1.0)
        assert got.tolist() == [token]


def test_logits_that_are_not_finite_stop_the_run(target, requests):
    broken = open_target(target.fingerprint["path"])
    broken.model.get_output_embeddings().weight.data[5, 0] = float("nan")
    with pytest.raises(ValueError, match=r"not finite in torch.float32.*target.dtype=bfloat16"):
        generate(broken, requests, stop_ids=stop_ids(broken))
