"""Replies from a server: the same as the target's own, and clear words for what goes wrong."""

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from data.config import DatasetConfig, RegenerateConfig, TargetConfig
from data.replies.endpoint import APART, OTHER_PROMPT, TOO_LONG
from data.replies.origin import origin_path
from data.replies.regenerate import regenerate
from data.replies.rules import LONG, NOT_REPRODUCED
from data.targets.model import load_target
from tests.server import Behaviour, serving
from tests.talkative import save_talkative_target
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

pytest.importorskip("openai")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = save_talkative_target(tmp_path_factory.mktemp("talkative") / "target")
    return load_target(TargetConfig(path=str(folder), device="cpu"))


@pytest.fixture
def server(target):
    with serving(Behaviour(target)) as behaviour:
        yield behaviour


@pytest.fixture
def make_config(target, chats_path, tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def make(server: Behaviour | None, name: str = "chats.jsonl", **changes) -> RegenerateConfig:
        values = {
            "target": TargetConfig(path=target.fingerprint["path"], device="cpu"),
            "dataset": DatasetConfig(path=str(chats_path), limit=6),
            "out": str(tmp_path / name),
            "endpoint": server and server.url,
            "max_new_tokens": 30,
            "max_length": 180,
        }
        return RegenerateConfig(**{**values, **changes})

    return make


def origin_of(config: RegenerateConfig) -> dict:
    return json.loads(origin_path(Path(config.out)).read_text())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_file_is_the_one_that_the_target_writes_itself(temperature, server, make_config):
    own = regenerate(make_config(None, "own.jsonl", temperature=temperature))
    served = regenerate(make_config(server, temperature=temperature, concurrency=4))
    assert served.read_bytes() == own.read_bytes()
    assert server.most_at_once > 1
    first = server.requests[1]  # after the probe
    assert first["messages"][-1]["role"] == "user"
    assert (first["max_tokens"], first["temperature"], first["top_p"]) == (30, temperature, 1.0)


def test_the_record_names_server_and_model(server, make_config):
    config = make_config(server)
    regenerate(config)
    origin = origin_of(config)
    assert origin["written_by"] == "endpoint"
    assert origin["endpoint"] == server.url
    assert origin["settings"]["model"] == "tiny"
    assert origin["counts"]["not_checked"] == 0


def test_no_more_chats_are_in_flight_than_was_said(server, make_config):
    regenerate(make_config(server, concurrency=2))
    assert server.most_at_once == 2


def test_a_request_that_fails_is_tried_again(server, make_config, tmp_path):
    server.failures = 2
    regenerate(make_config(server))
    assert server.failures == 0


def test_a_server_that_dies_loses_nothing_of_the_log(server, make_config, tmp_path, caplog):
    config = make_config(server, concurrency=2)
    victim = os.fork()
    if victim == 0:
        regenerate(config)
        os._exit(0)
    part = tmp_path / "chats.jsonl.part"
    while not part.is_file() or part.read_bytes().count(b"\n") < 4:
        time.sleep(0.002)
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
    there = part.read_bytes().count(b"\n") - 1
    server.requests.clear()
    with caplog.at_level(logging.INFO):
        regenerate(config)
    assert f"resume: {there} replies are there" in caplog.text
    own = regenerate(make_config(None, "own.jsonl"))
    assert (tmp_path / "chats.jsonl").read_bytes() == own.read_bytes()
    counts = origin_of(config)["counts"]
    asked = counts["replies"] + sum(counts["chats"]["dropped"].values())
    asked += sum(counts["chats"]["mended"].values())
    assert len(server.requests) <= 1 + asked - there


def test_a_finished_file_needs_no_server(server, make_config, caplog):
    config = make_config(server)
    regenerate(config)
    config.endpoint = "http://127.0.0.1:9/v1"
    with caplog.at_level(logging.INFO):
        regenerate(config)
    assert "is finished: nothing to do" in caplog.text


def test_the_targets_own_replies_are_not_mixed_with_a_servers(server, make_config):
    regenerate(make_config(None))
    with pytest.raises(ValueError, match=r"\n  written_by: target there, endpoint now\n"):
        regenerate(make_config(server))


def test_a_prompt_longer_than_the_servers_context_ends_the_chat(server, make_config):
    server.context = 150
    config = make_config(server)
    regenerate(config)
    mended = origin_of(config)["counts"]["chats"]["mended"]
    assert mended[f"ended before a {TOO_LONG}"] >= 1


def test_a_model_that_is_not_there_is_an_error_with_those_that_are(server, make_config):
    server.models = ["one", "two"]
    with pytest.raises(ValueError, match=r"model=null is none of .*: one, two. Give model=NAME"):
        regenerate(make_config(server))
    with pytest.raises(ValueError, match=r"model=three is none of .*: one, two. Give model=NAME"):
        regenerate(make_config(server, model="three"))
    config = make_config(server, model="two")
    regenerate(config)
    assert origin_of(config)["settings"]["model"] == "two"


def test_no_server_is_an_error_that_says_how_to_start_one(make_config, tmp_path):
    nobody = Behaviour(None, url="http://127.0.0.1:9/v1")
    with pytest.raises(RuntimeError, match=r"No server answers at http://.*:9/v1 .*vllm serve"):
        regenerate(make_config(nobody))
    assert not list(tmp_path.iterdir())


def test_without_the_package_the_extra_is_named(server, make_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)  # as if it were not installed
    with pytest.raises(ValueError, match=r"pip install -e '.\[endpoint\]'"):
        regenerate(make_config(server))


def test_a_wrong_address_or_key_is_an_error_that_says_what_is_expected(
    server, make_config, monkeypatch
):
    with pytest.raises(ValueError, match=r"Expected endpoint=http://HOST:PORT/v1"):
        regenerate(make_config(server, endpoint=server.url.removesuffix("/v1")))
    server.key = "secret"
    with pytest.raises(ValueError, match=r"wants another API key: set OPENAI_API_KEY"):
        regenerate(make_config(server))
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    regenerate(make_config(server))


def test_a_server_with_another_template_is_refused_before_the_work(server, make_config):
    server.tokenizer = tiny_tokenizer(CHAT_TEMPLATE.replace("Be brief.", "Be kind."))
    with pytest.raises(ValueError, match=r"makes another prompt than .*Be kind.* there,.*Be brief"):
        regenerate(make_config(server))
    assert len(server.requests) == 1


def test_a_server_that_tells_only_counts_is_compared_by_them(server, make_config, caplog):
    server.tells_ids = False
    config = make_config(server)
    with caplog.at_level(logging.INFO):
        out = regenerate(config)
    counts = origin_of(config)["counts"]
    assert 0 < counts["not_checked"] == counts["replies"]
    assert f"{counts['replies']} not checked, as the server gives no token ids" in caplog.text
    own = regenerate(make_config(None, "own.jsonl"))
    assert out.read_bytes() == own.read_bytes()
    assert counts["tokens"] == origin_of(make_config(None, "own.jsonl"))["counts"]["tokens"]
    server.tokenizer = tiny_tokenizer(CHAT_TEMPLATE.replace("Be brief.", "Be very brief."))
    with pytest.raises(ValueError, match=r"makes another prompt than .*: 48 tokens there, 43 here"):
        regenerate(make_config(server, "other.jsonl"))


def dropped(server: Behaviour, config: RegenerateConfig) -> str:
    with pytest.raises(ValueError, match="No reply could be kept") as error:
        regenerate(config)
    return str(error.value)


def test_thoughts_that_the_server_keeps_apart_are_not_lost_silently(server, make_config):
    for field in ("reasoning", "reasoning_content"):
        server.reply = {field: "hm"}
        assert f"6  no reply kept: {APART}" in dropped(server, make_config(server, field))


def test_what_a_server_changes_is_counted_with_the_reason(server, make_config):
    server.reply = {"content": "something else"}
    assert NOT_REPRODUCED in dropped(server, make_config(server, "a"))
    server.reply, server.finish = {}, "content_filter"
    reason = "reply that the server ends with 'content_filter'"
    assert reason in dropped(server, make_config(server, "b"))
    server.finish = "length"
    assert LONG in dropped(server, make_config(server, "c"))


def test_a_prompt_that_differs_later_ends_the_chat(server, make_config):
    """The server's template leaves an older reply out, say: a first prompt does not show it."""
    template = CHAT_TEMPLATE.replace(
        "{{ message['content'] }}",
        "{{ message['content'] if loop.last or message.role != 'assistant' else '' }}",
    )
    server.tokenizer = tiny_tokenizer(template)
    config = make_config(server)
    regenerate(config)
    counts = origin_of(config)["counts"]
    assert counts["chats"]["mended"][f"ended before a {OTHER_PROMPT}"] >= 1
    assert counts["replies"] == counts["chats"]["used"]
