"""Every artifact says whose replies the chats hold, and nothing claims what it cannot know."""

import json
import logging
from pathlib import Path

import pytest

from data.cache.reader import FeatureCache
from data.config import DatasetConfig, DumpConfig, RegenerateConfig, TargetConfig
from data.dump.run import dump
from data.replies.origin import describe_replies, origin_path, replies_of
from data.replies.regenerate import regenerate
from tests.talkative import save_talkative_target
from train.config import ExportConfig, HeldoutConfig, TrainConfig
from train.fit.loop import fit
from train.serve.export import export


@pytest.fixture(scope="module")
def talkative(tmp_path_factory) -> Path:
    return save_talkative_target(tmp_path_factory.mktemp("talkative") / "target")


@pytest.fixture(scope="module")
def regenerated(talkative, chats_path, tmp_path_factory) -> Path:
    return regenerate(
        RegenerateConfig(
            target=TargetConfig(path=str(talkative), device="cpu"),
            dataset=DatasetConfig(path=str(chats_path)),
            out=str(tmp_path_factory.mktemp("regenerated") / "chats.jsonl"),
            max_new_tokens=30,
            max_length=200,
        )
    )


def dump_config(target: Path, chats: Path, out: Path, **changes) -> DumpConfig:
    return DumpConfig(
        target=TargetConfig(path=str(target), device="cpu"),
        dataset=DatasetConfig(path=str(chats)),
        out=str(out),
        max_length=200,
        **changes,
    )


def test_cache_run_and_card_say_that_the_target_wrote_the_replies(
    talkative, regenerated, chats_path, tmp_path, caplog
):
    with caplog.at_level(logging.INFO):
        cache = dump(dump_config(talkative, regenerated, tmp_path / "features"))
    origin = json.loads(origin_path(regenerated).read_text())
    said = f"written by the target (fingerprint {origin['fingerprint']['weights']}, temperature 0)"
    assert f"replies: {said}" in caplog.text
    assert "warning" not in caplog.text

    plan = json.loads((cache / "plan.json").read_text())
    manifest = FeatureCache(cache).manifest
    assert plan["replies"] == manifest["replies"]
    assert manifest["replies"]["written_by"] == "target"
    assert manifest["replies"]["fingerprint"] == origin["fingerprint"]
    assert manifest["replies"]["source_sha256"] == origin["settings"]["dataset.sha256"]
    assert manifest["replies"]["temperature"] == 0

    run = tmp_path / "run"
    caplog.clear()
    with caplog.at_level(logging.INFO):
        fit(
            TrainConfig(
                features=str(cache), out=str(run), max_steps=1, heldout=HeldoutConfig(share=0)
            )
        )
    assert f"replies: {said}" in caplog.text
    assert json.loads((run / "run.json").read_text())["replies"] == manifest["replies"]

    out = export(ExportConfig(checkpoint=str(run)))
    assert f"Replies in the chats: {said}." in (out / "README.md").read_text()
    record = json.loads((out / "eagle_head.json").read_text())
    assert record["replies"] == manifest["replies"]


def test_replies_of_unknown_origin_are_called_that(
    talkative, chats_path, tmp_path, caplog, run_path
):
    with caplog.at_level(logging.INFO):
        cache = dump(dump_config(talkative, chats_path, tmp_path / "features"))
    assert "replies: as in the file" in caplog.text
    assert FeatureCache(cache).manifest["replies"] == {"written_by": "unknown"}
    out = export(ExportConfig(checkpoint=str(run_path), out=str(tmp_path / "export")))
    assert "Replies in the chats: as in the file." in (out / "README.md").read_text()


def test_another_target_is_warned_of_by_the_field_that_differs(regenerated, tmp_path, caplog):
    other = save_talkative_target(tmp_path / "other", seed=1)
    with caplog.at_level(logging.INFO):
        dump(dump_config(other, regenerated, tmp_path / "features", dry_run=True))
    assert "replies: written by another target (fingerprint " in caplog.text
    warnings = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "written by another target than this one" in warnings[0]
    assert "weights: " in warnings[0]


def test_a_file_that_was_changed_is_of_unknown_origin(regenerated, talkative, tmp_path, caplog):
    chats = tmp_path / "chats.jsonl"
    chats.write_text(regenerated.read_text().replace("cat", "dog"))
    origin_path(chats).write_text(origin_path(regenerated).read_text())
    with caplog.at_level(logging.INFO):
        dump(dump_config(talkative, chats, tmp_path / "features", dry_run=True))
    assert f"{chats} has changed since chats.jsonl.origin.json was written" in caplog.text
    assert "replies: as in the file" in caplog.text


def test_a_resumed_or_finished_dump_says_it_again(regenerated, talkative, tmp_path, caplog):
    cache = dump(dump_config(talkative, regenerated, tmp_path / "features"))
    (cache / "manifest.json").unlink()
    for _ in range(2):  # resumed, finished
        caplog.clear()
        with caplog.at_level(logging.INFO):
            dump(dump_config(talkative, regenerated, cache))
        assert "replies: written by the target" in caplog.text


@pytest.mark.parametrize("text", ["{}", "[]", '{"format_version": 99}', "no JSON"])
def test_a_record_that_cannot_be_read_is_an_error_not_a_guess(text, tmp_path):
    chats = tmp_path / "chats.jsonl"
    chats.write_text("{}")
    origin_path(chats).write_text(text)
    with pytest.raises(ValueError, match=r"chats.jsonl.origin.json is (no record|not valid JSON)"):
        replies_of(str(chats), checksum="")


def test_a_served_target_is_named_with_its_address():
    fingerprint = {"path": "x", "weights": "abc"}
    replies = {
        "written_by": "endpoint",
        "endpoint": "http://host/v1",
        "model": "my-model",
        "temperature": 0.7,
        "fingerprint": fingerprint,
    }
    assert describe_replies(replies, fingerprint) == (
        "written by the target as my-model at http://host/v1 (fingerprint abc, temperature 0.7)"
    )
