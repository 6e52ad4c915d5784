"""Regenerated chats: what they hold, that nothing disturbs them, and what is refused."""

import fcntl
import json
import logging
import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch

from data.chats.conversations import Counts, read_conversations
from data.chats.prompts import prompt_ids
from data.chats.rendering import render_all
from data.config import DatasetConfig, RegenerateConfig, TargetConfig
from data.replies.generation import answer_here
from data.replies.log import ReplyLog
from data.replies.origin import origin_path
from data.replies.regenerate import regenerate
from data.replies.rules import LONG, NO_ROOM, Chat, Reply, replies_in
from data.targets.model import load_target, load_tokenizer
from tests.talkative import save_talkative_target
from tests.tiny import save_tiny_chats

MAX_NEW_TOKENS, MAX_LENGTH = 30, 180


@pytest.fixture(scope="module")
def talkative(tmp_path_factory) -> Path:
    return save_talkative_target(tmp_path_factory.mktemp("talkative") / "target")


@pytest.fixture(scope="module")
def make_config(talkative, chats_path):
    def make(out: Path, *, dtype: str = "auto", limit: int | None = None, **changes):
        values = {
            "target": TargetConfig(path=str(talkative), device="cpu", dtype=dtype),
            "dataset": DatasetConfig(path=str(chats_path), limit=limit),
            "out": str(out),
            "max_new_tokens": MAX_NEW_TOKENS,
            "max_length": MAX_LENGTH,
            "batch_tokens": 700,
        }
        return RegenerateConfig(**{**values, **changes})

    return make


@pytest.fixture(scope="module")
def finished(make_config, tmp_path_factory) -> Path:
    return regenerate(make_config(tmp_path_factory.mktemp("finished") / "chats.jsonl"))


def stopped_before_the_end(config: RegenerateConfig) -> bytes:
    """Run in a process that dies when all replies are in the log. Returns the log."""
    child = os.fork()
    if child == 0:
        Path.replace = lambda *_: os._exit(9)  # type: ignore[method-assign, assignment]
        regenerate(config)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 9
    assert not Path(config.out).exists()
    return part_of(Path(config.out)).read_bytes()


def part_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.part")


def records_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_reader_takes_the_file_as_it_is(finished, chats_path):
    counts = Counts()
    written = list(read_conversations(DatasetConfig(path=str(finished)), counts))
    assert counts.used == counts.read == len(written) > 15
    assert not counts.mended
    asked = {c.id: c for c in read_conversations(DatasetConfig(path=str(chats_path)), Counts())}
    assert [c.id for c in written] == [name for name in asked if name in {c.id for c in written}]
    for conversation in written:
        questions = asked[conversation.id].turns[: len(conversation.turns) : 2]
        assert conversation.turns[::2] == questions


def test_each_reply_is_the_targets_greedy_answer_to_its_own_history(finished, talkative):
    target = load_target(TargetConfig(path=str(talkative), device="cpu"))
    end = target.tokenizer.eos_token_id
    num_replies = 0
    for record in records_of(finished):
        for number, message in enumerate(record["messages"]):
            if message["role"] != "assistant":
                continue
            prompt = prompt_ids(target.tokenizer, record["messages"][:number])
            text = target.tokenizer(message["content"], add_special_tokens=False)
            ids = [*text.input_ids, end]
            logits = target.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == ids
            num_replies += 1
    assert num_replies > 30


def test_the_dump_supervises_exactly_the_tokens_that_were_generated(finished, talkative):
    tokenizer = load_tokenizer(TargetConfig(path=str(talkative)))
    conversations = read_conversations(DatasetConfig(path=str(finished)), Counts())
    sequences = render_all(tokenizer, conversations, max_length=MAX_LENGTH, counts=Counts())
    replies = list(replies_in(list(sequences)))
    counts = json.loads(origin_path(finished).read_text())["counts"]
    assert counts["replies"] == len(replies)
    assert counts["tokens"] == sum(map(len, replies))
    assert all(reply[-1] == tokenizer.eos_token_id for reply in replies)


def test_every_chat_is_kept_whole_or_counted_with_the_reason(finished, chats_path):
    chats = json.loads(origin_path(finished).read_text())["counts"]["chats"]
    records = records_of(finished)
    assert chats["read"] == 24
    assert chats["used"] == len(records)
    assert chats["dropped"] == {f"no reply kept: {LONG}": 24 - len(records)}
    ended = [record["ended_before"] for record in records if record["ended_before"]]
    assert set(ended) == {LONG, NO_ROOM}
    assert sum(chats["mended"].values()) == len(ended)
    asked = {c.id: c for c in read_conversations(DatasetConfig(path=str(chats_path)), Counts())}
    for record in records:
        is_whole = len(record["messages"]) == len(asked[record["id"]].turns)
        assert is_whole == (record["ended_before"] is None)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_batches_change_nothing(temperature, make_config, tmp_path):
    outs = [
        regenerate(
            make_config(tmp_path / f"{n}.jsonl", batch_tokens=n, temperature=temperature, seed=3)
        ).read_bytes()
        for n in (1, 100_000)
    ]
    assert outs[0] == outs[1]


def test_another_seed_draws_other_replies(make_config, tmp_path):
    outs = [
        regenerate(make_config(tmp_path / f"{n}.jsonl", temperature=0.8, seed=n)).read_bytes()
        for n in (1, 2)
    ]
    assert outs[0] != outs[1]


def test_a_run_that_was_killed_ends_with_the_same_bytes(make_config, finished, tmp_path, caplog):
    out = tmp_path / "chats.jsonl"
    victim = os.fork()
    if victim == 0:
        regenerate(make_config(out))
        os._exit(0)
    while not part_of(out).is_file() or part_of(out).read_bytes().count(b"\n") < 4:
        time.sleep(0.002)
    os.kill(victim, signal.SIGKILL)
    _, status = os.waitpid(victim, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert not out.exists()
    with caplog.at_level(logging.INFO):
        regenerate(make_config(out))
    assert "replies are there" in caplog.text
    assert out.read_bytes() == finished.read_bytes()
    assert origin_path(out).read_bytes() == origin_path(finished).read_bytes()
    assert sorted(tmp_path.iterdir()) == [out, origin_path(out)]


def test_a_log_that_ends_anywhere_leads_to_the_same_bytes(make_config, tmp_path):
    whole = regenerate(make_config(tmp_path / "whole.jsonl", limit=9)).read_bytes()
    config = make_config(tmp_path / "chats.jsonl", limit=9)
    log = stopped_before_the_end(config)
    ends = [i + 1 for i, byte in enumerate(log) if byte == ord("\n")]
    cuts = [10, ends[0], *ends[1::5], *(end - 7 for end in ends[2::7])]
    for cut in cuts:
        for file in tmp_path.glob("chats.jsonl*"):
            file.unlink()
        part_of(tmp_path / "chats.jsonl").write_bytes(log[:cut])
        assert regenerate(config).read_bytes() == whole, cut


def test_replies_in_the_log_are_not_written_again(make_config, tmp_path):
    config = make_config(tmp_path / "chats.jsonl", limit=4)
    log = stopped_before_the_end(config)
    assert log.count(b"\n") > 5
    assert stopped_before_the_end(config) == log


def test_what_is_left_is_computed_in_the_batches_of_an_undisturbed_run(make_config, tmp_path):
    """Rows of another batch would be rounded otherwise, and some replies be others."""
    config = make_config(tmp_path / "chats.jsonl")
    target = load_target(config.target)
    prefills: list[torch.Size] = []

    def note(module, args, kwargs):
        if kwargs["input_ids"].shape[1] > 1:
            prefills.append(kwargs["input_ids"].shape)

    target.model.register_forward_pre_hook(note, with_kwargs=True)

    def answer(path: Path) -> list[torch.Size]:
        prefills.clear()
        sizes = dict(max_new_tokens=MAX_NEW_TOKENS, max_length=MAX_LENGTH)
        conversations = read_conversations(config.dataset, Counts())
        chats = (Chat(each, target.tokenizer, **sizes) for each in conversations)
        with path.open("a+b") as file:
            log = ReplyLog(path, file)
            if log.header is None:
                log.begin({})
            answer_here(target, chats, log, config, lambda *_: None)
        return list(prefills)

    whole = answer(tmp_path / "whole")
    lines = (tmp_path / "whole").read_text().splitlines(keepends=True)
    assert whole[1][0] > 2
    inside = 1 + whole[0][0] + 2  # the header, the first batch, and some of the second
    (tmp_path / "part").write_text("".join(lines[:inside]))
    assert answer(tmp_path / "part") == whole[1:]
    assert sorted((tmp_path / "part").read_text().splitlines(keepends=True)) == sorted(lines)


def test_a_finished_file_is_left_alone_and_said_so(make_config, finished, caplog):
    files = sorted(finished.parent.iterdir())
    before = [(file, file.stat().st_mtime_ns) for file in files]
    with caplog.at_level(logging.INFO):
        regenerate(make_config(finished))
    assert f"{finished} is finished: nothing to do." in caplog.text
    files = sorted(finished.parent.iterdir())
    assert [(file, file.stat().st_mtime_ns) for file in files] == before


CHANGES = [
    ({"temperature": 0.5}, ["temperature: 0.0 there, 0.5 now"]),
    ({"seed": 7, "top_p": 0.9}, ["top_p: 1.0 there, 0.9 now", "seed: 0 there, 7 now"]),
    ({"max_new_tokens": 9}, ["max_new_tokens: 30 there, 9 now"]),
    ({"max_length": 99}, ["max_length: 180 there, 99 now"]),
    ({"dtype": "bfloat16"}, ["target.dtype: float32 there, bfloat16 now"]),
    ({"limit": 3}, ["dataset.limit: None there, 3 now"]),
]


@pytest.mark.parametrize(("changes", "lines"), CHANGES)
def test_other_settings_are_refused_by_name(changes, lines, make_config, finished, tmp_path):
    with pytest.raises(ValueError, match="was made with other settings") as error:
        regenerate(make_config(finished, **changes))
    assert str(error.value).splitlines()[1:-1] == [f"  {line}" for line in lines]
    assert not part_of(finished).exists()

    unfinished = tmp_path / "chats.jsonl"
    origin = json.loads(origin_path(finished).read_text())
    header = {name: origin[name] for name in ("format_version", "settings", "fingerprint")}
    part_of(unfinished).write_text(json.dumps(header) + "\n")
    with pytest.raises(ValueError, match="was made with other settings") as error:
        regenerate(make_config(unfinished, **changes))
    assert str(error.value).splitlines()[1:-1] == [f"  {line}" for line in lines]
    assert part_of(unfinished).read_text() == json.dumps(header) + "\n"


def test_another_target_is_refused_by_the_fields_that_differ(make_config, finished, tmp_path):
    other = save_talkative_target(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match=r"\n  weights: \w+ here, \w+ there\n"):
        regenerate(make_config(finished, target=TargetConfig(path=str(other), device="cpu")))


def test_batch_tokens_may_change_when_a_run_goes_on(make_config, finished):
    regenerate(make_config(finished, batch_tokens=3))


def test_two_at_once_are_refused(make_config, tmp_path):
    out = tmp_path / "chats.jsonl"
    with part_of(out).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match=r"Another run is writing .*chats.jsonl.part"):
            regenerate(make_config(out))


def test_a_foreign_file_is_left_alone(make_config, tmp_path):
    out = tmp_path / "chats.jsonl"
    out.write_text("years of work")
    with pytest.raises(ValueError, match="no run of this command wrote it"):
        regenerate(make_config(out))
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [
        ("chats.jsonl", "years of work")
    ]


def test_a_file_that_was_changed_later_is_refused(make_config, tmp_path):
    out = regenerate(make_config(tmp_path / "chats.jsonl", limit=3))
    out.write_text(out.read_text().replace("cat", "dog"))
    with pytest.raises(ValueError, match="has changed since it was written"):
        regenerate(make_config(out, limit=3))


def test_a_damaged_log_is_named_by_line(make_config, tmp_path):
    config = make_config(tmp_path / "chats.jsonl", limit=3)
    log = stopped_before_the_end(config).splitlines(keepends=True)
    log[2] = b"\0" * 20 + b"\n"
    part_of(tmp_path / "chats.jsonl").write_bytes(b"".join(log))
    with pytest.raises(ValueError, match=r"chats.jsonl.part:3 is not a reply"):
        regenerate(config)


def test_a_full_disk_loses_nothing_of_the_log(tmp_path):
    replies = [Reply(f"é{n}", 0, "yes " * n, n, True, None) for n in range(9)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "log"
    with path.open("a+b") as file:
        log = ReplyLog(path, file)
        log.begin({"settings": 1})
        log.append(replies[:6])
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 30, before[1]))
        try:
            with pytest.raises(RuntimeError, match=r"Cannot write .*log: .*too large"):
                log.append(replies[6:])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with path.open("a+b") as file:
        log = ReplyLog(path, file)
        assert log.header == {"settings": 1}
        assert len(log) == 6
        log.append(replies[6:])
    with path.open("a+b") as file:
        log = ReplyLog(path, file)
        assert [log.find(reply.id, 0) for reply in replies] == replies
        assert log.find("é0", 1) is None


def test_no_reply_that_could_be_kept_is_an_error_with_the_reasons(make_config, tmp_path):
    out = tmp_path / "chats.jsonl"
    with pytest.raises(ValueError, match="No reply could be kept") as error:
        regenerate(make_config(out, max_new_tokens=2, limit=1))
    assert f"dropped        1  no reply kept: {LONG}  (chat0_0)" in str(error.value)
    assert not out.exists()
    with pytest.raises(ValueError, match="No reply could be kept") as error:
        regenerate(make_config(tmp_path / "short.jsonl", max_length=5))
    assert f"dropped       24  no reply kept: {NO_ROOM}" in str(error.value)


def test_what_cannot_work_is_refused_at_once(make_config, tmp_path):
    out = tmp_path / "chats.jsonl"
    with pytest.raises(ValueError, match=r"knows 512 positions .*Set max_length=512 or less"):
        regenerate(make_config(out, max_length=513))
    with pytest.raises(ValueError, match=r"target.engine=vllm computes features only"):
        regenerate(make_config(out, target=TargetConfig(path="x", engine="vllm")))
    with pytest.raises(ValueError, match=r"temperature is -1, but must be 0 \(greedy\) or more"):
        make_config(out, temperature=-1)
    with pytest.raises(ValueError, match=r"top_p is 0, but must be above 0 and at most 1"):
        make_config(out, top_p=0)
    with pytest.raises(ValueError, match=r"max_new_tokens is 1, but must be at least 2"):
        make_config(out, max_new_tokens=1)
    with pytest.raises(ValueError, match=r"model=x is a name at an endpoint"):
        make_config(out, model="x")
    assert not list(tmp_path.iterdir())


def test_a_target_that_does_not_stop_where_its_template_does_is_refused(make_config, tmp_path):
    target = save_talkative_target(tmp_path / "target")
    for name in ("generation_config.json", "tokenizer_config.json"):
        text = (target / name).read_text().replace('"eos_token_id": 2', '"eos_token_id": 0')
        (target / name).write_text(text.replace('"eos_token": "<|im_end|>"', '"eos_token": "a"'))
    config = make_config(
        tmp_path / "chats.jsonl", target=TargetConfig(path=str(target), device="cpu")
    )
    with pytest.raises(ValueError, match=r"ends a reply with '<\|im_end\|>', but the target stops"):
        regenerate(config)


def test_more_chats_than_the_pool_holds_are_answered(make_config, tmp_path, monkeypatch):
    import data.replies.generation

    chats = save_tiny_chats(tmp_path / "chats.json", 24)
    whole = regenerate(make_config(tmp_path / "a.jsonl", dataset=DatasetConfig(path=str(chats))))
    monkeypatch.setattr(data.replies.generation, "POOL", 5)
    small = regenerate(make_config(tmp_path / "b.jsonl", dataset=DatasetConfig(path=str(chats))))
    assert small.read_bytes() == whole.read_bytes()
