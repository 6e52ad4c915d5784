import json
import logging
from pathlib import Path

import pytest
import torch

from data.config import TargetConfig
from data.prompts import prompt_ids
from data.target import Target, load_target
from tests.heads import export_tiny, random_head, trained_head
from tests.tiny import save_tiny_target, tiny_llama_config
from train.config import EvaluateConfig
from train.decode import Drafting, plain_generate, speculative_generate, stop_ids_of
from train.evaluate import evaluate, explain_difference
from train.report import table, write_report

NEW = 12
RECORDS = [
    {"question_id": 1, "category": "colours", "turns": ["red or blue?", "and green?"]},
    {"id": "b", "category": "animals", "prompt": "a cat"},
    {"id": "c", "category": "animals", "messages": [{"role": "user", "content": "the dog says"}]},
    {"id": "d", "prompt": "sun " * 40},
]


@pytest.fixture(scope="module")
def target(target_path) -> Target:
    return load_target(TargetConfig(path=str(target_path), device="cpu"))


@pytest.fixture(scope="module")
def head_path(tmp_path_factory, target) -> Path:
    texts = ("red or blue?", "a cat", "the dog says")
    prompts = [
        torch.tensor(prompt_ids(target.tokenizer, [{"role": "user", "content": text}]))
        for text in texts
    ]
    head = trained_head(target, prompts, steps=150)
    return export_tiny(head, target, tmp_path_factory.mktemp("head"))


def save_prompts(folder: Path, records: list[dict]) -> str:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


@pytest.fixture(scope="module")
def config(tmp_path_factory, target_path, head_path) -> EvaluateConfig:
    return EvaluateConfig(
        head=str(head_path),
        target=TargetConfig(path=str(target_path), device="cpu"),
        prompts=save_prompts(tmp_path_factory.mktemp("prompts"), RECORDS),
        max_new_tokens=NEW,
        max_prompt_tokens=150,
    )


@pytest.fixture(scope="module")
def report(config) -> dict:
    return evaluate(config)


def test_every_answer_equals_plain_decoding(report):
    assert report["outputs_equal"] == report["overall"]["answers"] == 4
    assert report["differences"] == []
    assert "4 of 4 answers equal plain decoding token for token" in table(report)


def test_counts_are_those_of_the_rounds(report):
    rounds = [count for answer in report["answers"] for count in answer["drafted"]["accepted"]]
    overall = report["overall"]
    assert overall["rounds"] == len(rounds) > 0
    assert overall["accepted"] == [sum(count >= n for count in rounds) for n in (1, 2, 3)]
    assert overall["tried"] == [len(rounds), *overall["accepted"][:2]]
    assert overall["acceptance_length"] == pytest.approx(1 + sum(rounds) / len(rounds))
    assert overall["acceptance_length_without_bonus"] == pytest.approx(sum(rounds) / len(rounds))
    assert overall["alpha"][0] == pytest.approx(overall["accepted"][0] / len(rounds))
    assert overall["acceptance_length"] > 1.3  # or the test would say little


def test_categories_add_up_to_the_whole(report):
    parts = report["categories"].values()
    assert set(report["categories"]) == {"colours", "animals"}
    for key in ("answers", "tokens", "rounds"):
        assert sum(part[key] for part in parts) == report["overall"][key]


def test_a_later_turn_follows_the_targets_own_answer(report, target):
    first, second = (a for a in report["answers"] if a["prompt"] == "1")
    answer = target.tokenizer.decode(first["plain"]["tokens"], skip_special_tokens=True)
    messages = [
        {"role": "user", "content": "red or blue?"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "and green?"},
    ]
    ids = prompt_ids(target.tokenizer, messages)
    assert second["turn"] == 2 and second["prompt_tokens"] == len(ids)
    expected = plain_generate(
        target, torch.tensor(ids), max_new_tokens=NEW, stop_ids=stop_ids_of(target)
    )
    assert second["drafted"]["tokens"] == expected.tokens


def test_a_prompt_that_is_too_long_is_left_out_and_named(report):
    assert report["too_long"] == ["d"]
    assert "left out  1, as too long" in table(report)


def test_the_files_hold_the_report(config, report):
    out = Path(config.head) / "evaluation"
    assert report["out"] == str(out)
    assert {file.name for file in out.iterdir()} == {
        "report.json",
        "report.txt",
        "acceptance.png",
    }
    assert json.loads((out / "report.json").read_text()) == report
    assert (out / "report.txt").read_text() == table(report) + "\n"
    assert (out / "acceptance.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_shows_the_figures_and_how_they_are_counted(report):
    text, overall = table(report), report["overall"]
    assert f"{overall['acceptance_length']:.3f}" in text
    assert f"{overall['accepted'][1]} of {overall['tried'][1]} at step 2" in text
    assert "τ = 1 + accepted / rounds" in text
    assert max(map(len, text.splitlines())) <= 130


def test_speeds_are_tokens_over_seconds(report):
    overall = report["overall"]
    speed = overall["tokens_per_second"]
    for way in ("with_head", "without_head"):
        assert speed[way] == pytest.approx(overall["tokens"] / overall["seconds"][way]["total"])
    assert overall["speedup"] == pytest.approx(speed["with_head"] / speed["without_head"])


def test_answers_of_one_token_have_no_rates(config, tmp_path):
    """An answer that ends with the token of its prefill is no round at all."""
    config = EvaluateConfig(**{**vars(config), "max_new_tokens": 1, "out": str(tmp_path)})
    report = evaluate(config)
    assert report["overall"]["rounds"] == 0
    row = next(line for line in table(report).splitlines() if line.startswith("all"))
    assert row.split()[4:9] == ["-"] * 5


def test_another_target_is_a_warning_that_names_the_field(config, tmp_path, caplog):
    other = save_tiny_target(tmp_path / "other", seed=1)
    changed = {
        "target": TargetConfig(path=str(other), device="cpu"),
        "limit": 1,
        "out": str(tmp_path / "out"),
    }
    with caplog.at_level(logging.WARNING, logger="train.evaluate"):
        report = evaluate(EvaluateConfig(**{**vars(config), **changed}))
    assert len(caplog.messages) == 1 and "trained for: weights: " in caplog.messages[0]
    assert "WARNING   other target: weights: " in table(report)
    assert report["outputs_equal"] == 2  # a foreign head costs speed, never a token


def test_a_target_of_another_size_is_refused(config, tmp_path):
    other = save_tiny_target(tmp_path, tiny_llama_config(hidden_size=48))
    changed = {"target": TargetConfig(path=str(other), device="cpu")}
    with pytest.raises(ValueError, match=r"hidden_size 32 and vocab_size 259, .* has 48 and 259"):
        evaluate(EvaluateConfig(**{**vars(config), **changed}))


def test_no_usable_prompt_is_an_error(config):
    with pytest.raises(ValueError, match=r"None of the 4 prompts .* at most 5 tokens"):
        evaluate(EvaluateConfig(**{**vars(config), "max_prompt_tokens": 5}))


def test_a_difference_without_a_tie_is_called_so(target):
    ids = torch.tensor([5, 6, 7])
    plain = plain_generate(target, ids, max_new_tokens=6, stop_ids=()).tokens
    other = [*plain[:4], (plain[4] + 1) % 259, plain[5]]
    found = explain_difference(target, ids, plain, other)
    logits = target.head.logits(target.features(torch.cat([ids, torch.tensor(plain[:4])])[None]))
    gap = float(logits[0, -1, plain[4]] - logits[0, -1, other[4]])
    assert found["position"] == 4 and not found["near_tie"]
    assert found["logit_gap"] == pytest.approx(gap, abs=1e-3)
    assert found["rounding"] < 1e-3


def test_two_tokens_with_the_same_logit_are_a_near_tie(tmp_path):
    path = save_tiny_target(tmp_path, tiny_llama_config(tie_word_embeddings=False))
    target = load_target(TargetConfig(path=str(path), device="cpu"))
    ids = torch.tensor([5, 6, 7])
    plain = plain_generate(target, ids, max_new_tokens=3, stop_ids=()).tokens
    twin = (plain[2] + 1) % 259
    target.head.weight[twin] = target.head.weight[plain[2]]
    found = explain_difference(target, ids, plain, [*plain[:2], twin])
    assert found["near_tie"] and found["logit_gap"] == 0


def test_an_answer_that_ends_early_differs_there(target):
    ids = torch.tensor([5, 6, 7])
    plain = plain_generate(target, ids, max_new_tokens=3, stop_ids=()).tokens
    found = explain_difference(target, ids, plain, plain[:2])
    assert found["position"] == 2 and found["logit_gap"] is None and not found["near_tie"]
    assert explain_difference(target, ids, plain, plain) is None


def test_differences_are_counted_and_shown(report, tmp_path):
    gaps = {"logit_gap": 1e-6, "rounding": 2e-6, "near_tie": True}
    difference = {"prompt": "b", "turn": 1, "position": 7, **gaps}
    changed = report | {"outputs_equal": 3, "differences": [difference]}
    write_report(changed, tmp_path)
    text = (tmp_path / "report.txt").read_text()
    assert "3 of 4 answers equal plain decoding; of the others 1 are near-ties" in text
    assert "b turn 1, token 7: near-tie, logits 1e-06 apart where rounding moves them by" in text


def test_an_untrained_head_reports_what_speculative_generate_counts(tmp_path, target, config):
    head = random_head(target)
    path = export_tiny(head, target, tmp_path)
    changed = {"head": str(path), "limit": 3, "num_steps": 5}
    report = evaluate(EvaluateConfig(**{**vars(config), **changed}))
    for answer, record in zip(report["answers"][2:], RECORDS[1:3], strict=True):
        text = record.get("prompt") or record["messages"][0]["content"]
        ids = torch.tensor(prompt_ids(target.tokenizer, [{"role": "user", "content": text}]))
        expected = speculative_generate(
            target,
            head,
            ids,
            drafting=Drafting.chain(5),
            max_new_tokens=NEW,
            stop_ids=stop_ids_of(target),
        )
        assert answer["drafted"]["accepted"] == expected.accepted
