import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.chats.prompts import prompt_ids
from data.config import TargetConfig
from data.targets.model import Target, load_target
from tests.evaluations import NEW, RECORDS, evaluation, ids_of
from tests.heads import export_tiny, random_head
from tests.tiny import save_tiny_target, tiny_llama_config
from train.config import EvaluateConfig
from train.decode import Drafting, plain_generate, speculative_generate, stop_ids_of
from train.measure.evaluate import evaluate
from train.measure.report_text import table


@pytest.fixture(scope="module")
def target(target_path) -> Target:
    return load_target(TargetConfig(path=str(target_path), device="cpu"))


@pytest.fixture(scope="module")
def config(tmp_path_factory, target_path, head_path) -> EvaluateConfig:
    return evaluation(tmp_path_factory.mktemp("evaluation"), target_path, head_path)


@pytest.fixture(scope="module")
def report(config) -> dict:
    return evaluate(config)


def answers_of(report: dict) -> list[dict]:
    lines = (Path(report["out"]) / "answers.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines[1:]) if "figure" not in one]


def again(config: EvaluateConfig, out: Path, **changes) -> dict:
    return evaluate(replace(config, out=str(out), **changes))


def test_every_answer_equals_plain_decoding(report):
    assert report["outputs_equal"] == report["overall"]["answers"] == 6
    assert report["differences"] == []
    assert "6 of 6 answers equal plain decoding token for token" in table(report)


def test_counts_are_those_of_the_rounds(report):
    rounds = [count for one in answers_of(report) for count in one["drafted"]["accepted"]]
    overall = report["overall"]
    assert overall["rounds"] == len(rounds) > 0
    assert overall["accepted"] == [sum(count >= n for count in rounds) for n in (1, 2, 3)]
    assert overall["tried"] == [len(rounds), *overall["accepted"][:2]]
    assert overall["acceptance_length"] == pytest.approx(1 + sum(rounds) / len(rounds))
    assert overall["acceptance_length"] > 1.3  # or the test would say little


def test_sets_and_their_categories_add_up_to_the_whole(report):
    sets = report["sets"]
    assert set(sets) == {"chat", "maths"}
    assert set(sets["chat"]["categories"]) == {"colours", "animals"}
    assert set(sets["maths"]["categories"]) == {"no category"}
    categories = [one for part in sets.values() for one in part["categories"].values()]
    for key in ("answers", "tokens", "rounds"):
        assert sum(part[key] for part in sets.values()) == report["overall"][key]
        assert sum(part[key] for part in categories) == report["overall"][key]


def test_a_later_turn_follows_the_targets_own_answer(report, target):
    first, second = (one for one in answers_of(report) if one["prompt"] == "1" and one["category"])
    answer = target.tokenizer.decode(first["plain"]["tokens"], skip_special_tokens=True)
    messages = [
        {"role": "user", "content": "red or blue?"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "and green?"},
    ]
    ids = prompt_ids(target.tokenizer, messages)
    assert second["turn"] == 2 and second["prompt_ids"] == ids
    expected = plain_generate(
        target, torch.tensor(ids), max_new_tokens=NEW, stop_ids=stop_ids_of(target)
    )
    assert second["drafted"]["tokens"] == expected.tokens


def test_a_prompt_that_is_too_long_is_left_out_and_named(report):
    assert report["too_long"] == ["chat d"]
    assert "left out  1, as too long" in table(report)


def test_the_files_hold_the_report(config, report):
    out = Path(config.out)
    assert report["out"] == str(out)
    files = {"answers.jsonl", "report.json", "report.txt", "report.html", ".lock"}
    assert {file.name for file in out.iterdir()} == files
    assert json.loads((out / "report.json").read_text()) == json.loads(json.dumps(report))
    assert (out / "report.txt").read_text() == table(report) + "\n"


def test_speeds_are_tokens_over_seconds(report):
    overall = report["overall"]
    speed = overall["tokens_per_second"]
    for way in ("with_head", "without_head"):
        assert speed[way] == pytest.approx(overall["tokens"] / overall["seconds"][way]["total"])
        parts = overall["seconds"][way]
        assert parts["total"] == pytest.approx(sum(parts.values()) - parts["total"])
    assert overall["speedup"] == pytest.approx(speed["with_head"] / speed["without_head"])


def test_the_report_says_what_speed_depends_on(report):
    assert report["settings"]["drafting"]["num_draft_tokens"] == 4
    assert report["settings"]["batch_size"] == 1 and report["settings"]["temperature"] == 0
    assert {"device", "threads", "torch", "transformers"} <= set(report["machine"])
    assert report["fingerprint"]["weights"] and report["head"]["engine"] == "vllm"


def test_the_best_tree_is_under_the_names_of_sglangs_arguments(report):
    best, chain = report["best_tree"], report["best_chain"]
    shape = (
        best["speculative_num_steps"],
        best["speculative_eagle_topk"],
        best["speculative_num_draft_tokens"],
    )
    if shape[1] > 1:
        Drafting.dynamic(num_steps=shape[0], topk=shape[1], num_draft_tokens=shape[2])
    else:
        assert shape[2] == shape[0] + 1
    assert chain["speculative_eagle_topk"] == 1
    assert chain["speculative_num_draft_tokens"] == chain["speculative_num_steps"] + 1
    assert best["expected_speedup"] * 1.02 >= chain["expected_speedup"]


def test_answers_of_one_token_have_no_rates(config, tmp_path):
    """An answer that ends with the token of its prefill is no round at all."""
    report = again(config, tmp_path, max_new_tokens=1)
    assert report["overall"]["rounds"] == 0 and "best_tree" not in report
    row = next(line for line in table(report).splitlines() if line.startswith("all"))
    assert row.split()[4:9] == ["-"] * 5
    assert (tmp_path / "report.html").is_file()


def test_another_target_is_a_warning_that_names_the_field(config, tmp_path, caplog):
    other = save_tiny_target(tmp_path / "other", seed=1)
    changes = {"target": TargetConfig(path=str(other), device="cpu"), "limit": 1}
    with caplog.at_level(logging.WARNING, logger="train.measure.evaluate"):
        report = again(config, tmp_path / "out", **changes)
    assert len(caplog.messages) == 1 and "trained for: weights: " in caplog.messages[0]
    assert "WARNING   other target: weights: " in table(report)
    assert report["outputs_equal"] == 3  # a foreign head costs speed, never a token


def test_a_target_of_another_size_is_refused(config, tmp_path):
    other = save_tiny_target(tmp_path, tiny_llama_config(hidden_size=48))
    with pytest.raises(ValueError, match=r"hidden_size 32 and vocab_size 259, .* has 48 and 259"):
        again(config, tmp_path / "out", target=TargetConfig(path=str(other), device="cpu"))


def test_no_usable_prompt_is_an_error(config, tmp_path):
    with pytest.raises(ValueError, match=r"None of the 6 prompts .* at most 5 tokens"):
        again(config, tmp_path, max_prompt_tokens=5)


def test_an_untrained_head_reports_what_speculative_generate_counts(
    tmp_path, target, config, target_path
):
    head = random_head(target)
    path = export_tiny(head, target, tmp_path)
    report = again(config, tmp_path / "out", head=str(path), limit=3, num_steps=5)
    measured = {one["prompt"]: one for one in answers_of(report) if one["set"] == "chat"}
    for record in RECORDS[1:3]:
        text = record.get("prompt") or record["messages"][0]["content"]
        expected = speculative_generate(
            target,
            head,
            ids_of(target, text),
            drafting=Drafting.chain(5),
            max_new_tokens=NEW,
            stop_ids=stop_ids_of(target),
        )
        assert measured[record["id"]]["drafted"]["accepted"] == expected.accepted


def test_batches_give_the_same_answers(config, report, tmp_path):
    batched = again(config, tmp_path, batch_size=3)
    assert batched["outputs_equal"] == 6

    def tokens(one: dict) -> dict:
        return {
            (a["set"], a["prompt"], a["turn"]): (a["plain"]["tokens"], a["drafted"]["accepted"])
            for a in answers_of(one)
        }

    assert tokens(batched) == tokens(report)
    total = batched["overall"]["seconds"]["with_head"]["total"]
    shares = [one["drafted"]["seconds"]["total"] for one in answers_of(batched)]
    assert total == pytest.approx(sum(shares)) and len(set(shares)) < len(shares)


def test_baselines_stand_in_the_same_table(config, tmp_path, target_path):
    both = {"baselines": ["prompt_lookup", "assistant"], "assistant": str(target_path)}
    report = again(config, tmp_path, **both)
    text = table(report)
    for name, one in report["overall"]["baselines"].items():
        assert one["outputs_equal"] == 6
        assert one["acceptance_length"] == pytest.approx(one["tokens"] / one["forwards"])
        way = {"prompt_lookup": "prompt lookup", "assistant": "assistant model"}[name]
        row = next(line for line in text.splitlines() if line.startswith(way))
        assert f"{one['acceptance_length']:.3f}" in row and row.endswith("6 of 6")
    assert report["overall"]["baselines"]["assistant"]["acceptance_length"] > 1.2


def test_drawn_answers_are_not_called_right_or_wrong(config, tmp_path):
    report = again(config, tmp_path, temperature=1.0, top_k=20, seed=3)
    text = table(report)
    assert "temperature 1, top_k 20" in text and "this proves nothing either way" in text
    assert "near-tie" not in text and report["overall"]["rounds"] > 0
    other = again(config, tmp_path / "other", temperature=1.0, top_k=20, seed=4)
    assert [a["plain"]["tokens"] for a in answers_of(report)] != [
        a["plain"]["tokens"] for a in answers_of(other)
    ]
