import gzip
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.chats.conversations import Conversation, Counts, read_conversations
from data.chats.sources import source_digest
from data.config import DatasetConfig
from data.dump.plan import dataset_settings, settings_differences
from tests.hub import COMMIT, serve_data_set

ROOT = Path(__file__).parent.parent


def chats(*names: object, dialect: str = "conversations") -> list[dict]:
    if dialect == "conversations":
        turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]
    else:
        turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    return [{"id": name, dialect: turns} for name in names]


def as_json(records: list) -> bytes:
    return json.dumps(records).encode()


def as_lines(records: list) -> bytes:
    return "\n".join(map(json.dumps, records)).encode()


def as_gzip(records: list) -> bytes:
    return gzip.compress(as_lines(records))


def as_parquet(records: list) -> bytes:
    keys = dict.fromkeys(key for record in records for key in record)
    table = pa.Table.from_pylist([{key: record.get(key) for key in keys} for record in records])
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def write(folder: Path, **files: bytes) -> Path:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return folder


def read(path: Path | str, **config) -> tuple[list[Conversation], Counts]:
    counts = Counts()
    settings = DatasetConfig(path=str(path), **{"max_dropped": 1.0, **config})
    return list(read_conversations(settings, counts)), counts


def ids(path: Path | str, **config) -> list[str]:
    return [conversation.id for conversation in read(path, **config)[0]]


# --- folders -----------------------------------------------------------------------------------


def test_files_of_a_folder_are_read_in_sorted_order_whatever_their_form(tmp_path):
    files = {
        "c.json": as_json(chats("c1", "c2")),
        "a.jsonl": as_lines(chats("a1", "a2")),
        "deep/b.json.gz": as_gzip(chats("b1")),
    }
    assert ids(write(tmp_path, **files)) == ["a1", "a2", "c1", "c2", "b1"]


def test_split_is_chosen_by_file_name_and_all_of_it_is_read(tmp_path):
    files = {
        "data/train-00000-of-00002.parquet": as_parquet(chats("t1", "t2")),
        "data/train-00001-of-00002.parquet": as_parquet(chats("t3", dialect="messages")),
        "data/test-00000-of-00001.parquet": as_parquet(chats("u1")),
        "README.md": b"Chats.",
    }
    write(tmp_path, **files)
    assert ids(tmp_path) == ["t1", "t2", "t3"]
    assert ids(tmp_path, split="test") == ["u1"]
    with pytest.raises(ValueError, match=r"has no split 'dev', but .*'train'.*dataset\.split="):
        read(tmp_path, split="dev")


def test_test_file_beside_a_training_file_is_not_trained_on(tmp_path):
    write(tmp_path, **{"train.json": as_json(chats("t")), "test.json": as_json(chats("u"))})
    assert ids(tmp_path) == ["t"]


def test_subset_of_a_folder_is_chosen_by_name(tmp_path):
    card = "---\nconfigs:\n- {config_name: a, data_files: x.json}\n" + (
        "- {config_name: b, data_files: y.json}\n---\n"
    )
    files = {"x.json": as_json(chats("x")), "y.json": as_json(chats("y"))}
    write(tmp_path, **files, **{"README.md": card.encode()})
    assert ids(tmp_path, name="b") == ["y"]
    with pytest.raises(ValueError, match=r"among the available configs: \['a', 'b'\].*dataset\.na"):
        read(tmp_path)


def test_file_that_is_left_out_of_a_folder_is_named(tmp_path, caplog):
    write(tmp_path, **{"a.parquet": as_parquet(chats("p")), "b.json": as_json(chats("j"))})
    assert ids(tmp_path) == ["p"]
    assert "left out b.json" in caplog.text


def test_record_of_where_chats_come_from_is_not_taken_for_chats(tmp_path, caplog):
    origin = {"a.jsonl.origin.json": b'{\n "target": "x"\n}'}
    assert ids(write(tmp_path, **{"a.jsonl": as_lines(chats("a"))}, **origin)) == ["a"]
    assert "left out" not in caplog.text


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"holds nothing that can be read.*\.parquet; found nothing"),
        ({"README.md": b"", "chats.xyz": b"a"}, r"nothing that can be read.*found README\.md, cha"),
        ({"a.txt": b"hello"}, r"Split 'train' of .* is a\.txt\. Expected files that end with \.js"),
        ({"state.json": b"{}", "data.arrow": b""}, r"save_to_disk.*load_from_disk\(.*to_parquet"),
        ({"a.json": as_json(chats("a")), "b.json": b"[{]"}, r"Record 1 of the array in .*b\.json"),
    ],
)
def test_folder_that_cannot_be_read_is_an_error_that_says_what_it_holds(tmp_path, files, message):
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path, **files))


# --- parquet -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["conversations", "messages"])
def test_parquet_gives_the_same_chats_as_json(tmp_path, dialect):
    records = chats("a_0", "a_1", "b_0", dialect=dialect)
    write(tmp_path, **{"a.parquet": as_parquet(records), "a.json": as_json(records)})
    assert read(tmp_path / "a.parquet")[0] == read(tmp_path / "a.json")[0]


def test_nulls_of_a_column_that_a_record_lacks_change_nothing(tmp_path):
    """Arrow gives every record all columns and every turn all fields."""
    mixed = chats("a") + chats("b", dialect="messages")
    turns = [
        {"from": "human", "value": "hello", "role": None, "content": None},
        {"role": "assistant", "content": "hi"},
    ]
    mixed.append({"id": "c", "messages": None, "conversations": turns})
    (tmp_path / "a.parquet").write_bytes(as_parquet(mixed))
    found, counts = read(tmp_path / "a.parquet")
    assert [c.id for c in found] == ["a", "b", "c"]
    assert len({c.turns for c in found}) == 1
    assert not counts.mended


def test_number_ids_are_the_same_through_arrow(tmp_path):
    numbers: list[int | None] = [7, None, 9]
    frame = pa.Table.from_pylist(chats(*numbers))
    frame = frame.set_column(0, "id", frame["id"].cast(pa.float64()))  # as pandas has them
    pq.write_table(frame, tmp_path / "float.parquet")
    (tmp_path / "int.parquet").write_bytes(as_parquet(chats(*numbers)))
    (tmp_path / "a.json").write_bytes(as_json(chats(*numbers)))
    for name in ("float.parquet", "int.parquet", "a.json"):
        found, counts = read(tmp_path / name)
        assert [c.id for c in found] == ["7", "record 2", "9"]
        assert counts.mended == {"no id": 1}


@pytest.mark.parametrize("content", [b"", b"hello", as_parquet(chats("a"))[:-30]])
def test_file_that_is_no_parquet_is_named(tmp_path, content):
    write(tmp_path, **{"a.parquet": content})
    with pytest.raises(ValueError, match=r"a\.parquet is no parquet file that can be read"):
        read(tmp_path / "a.parquet")


def test_memory_of_parquet_is_that_of_a_few_rows_and_not_of_a_row_group(tmp_path):
    text = [os.urandom(2000).hex() for _ in range(50)]
    records = [
        {"conversations": [{"from": "human", "value": t}, {"from": "gpt", "value": t[::-1]}]}
        for t in text * 80
    ]
    table = pa.Table.from_pylist(records)
    pq.write_table(table, tmp_path / "a.parquet", compression="none", use_dictionary=False)
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 1
    assert table.nbytes > 30e6
    del table
    pool = pa.default_memory_pool()
    before, most = pool.bytes_allocated(), 0
    tracemalloc.start()
    for _ in read_conversations(DatasetConfig(path=str(tmp_path / "a.parquet")), Counts()):
        most = max(most, pool.bytes_allocated() - before)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0 < most < 8e6
    assert peak < 12e6


# --- what a path is ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["none.json", "org/none.jsonl", "a.json.gz", "./none", "/none", "a/b/c", "~/none", "-"]
)
def test_path_that_can_be_no_hub_id_is_a_missing_file(path):
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        read(path)


def test_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, **{"a.json": as_json(chats("a"))})
    assert ids("~/a.json") == ["a"]


@pytest.mark.parametrize("choice", [{"split": "test"}, {"name": "x"}, {"revision": "main"}])
def test_choice_that_a_file_does_not_offer_is_refused(tmp_path, choice):
    write(tmp_path, **{"a.json": as_json(chats("a"))})
    with pytest.raises(ValueError, match=r"is the file .*a\.json, which is read whole"):
        read(tmp_path / "a.json", **choice)


# --- the hub -----------------------------------------------------------------------------------


def on_the_hub(endpoint: str, home: Path, code: str) -> str:
    """Run `code` in a process of its own: the clients read their address once."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    environment |= {"HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


HUB = """
import json
from data.config import DatasetConfig
from data.chats.conversations import Counts, read_conversations
from data.chats.sources import source_digest

def found(**config):
    config = DatasetConfig(**config)
    try:
        digest = source_digest(config)
        return [digest, *(c.id for c in read_conversations(config, Counts()))]
    except (ValueError, RuntimeError) as error:
        return [type(error).__name__, str(error)]

print(json.dumps([found(**c) for c in CASES]))
"""


def test_hub_data_sets_are_read_with_their_commit_and_without_a_copy(tmp_path):
    files = {
        "data/train-00000-of-00002.jsonl": as_lines(chats("a", "b")),
        "data/train-00001-of-00002.jsonl.gz": as_gzip(chats("c")),
        "data/test_sft-00000-of-00001.jsonl": as_lines(chats("d", dialect="messages")),
    }
    cases: list[dict] = [
        {"path": "org/chats"},
        {"path": "org/chats", "split": "test_sft", "revision": COMMIT},
        {"path": "org/chats", "split": "dev"},
        {"path": "org/chats", "revision": "none"},
        {"path": "org/chat"},
    ]
    with serve_data_set(write(tmp_path / "hub", **files)) as endpoint:
        code = f"CASES = {cases!r}\n{HUB}"
        train, test, *errors = json.loads(on_the_hub(endpoint, tmp_path / "home", code))
    assert train == [COMMIT, "a", "b", "c"]
    assert test == [COMMIT, "d"]
    expected = ("no split 'dev', but 'train'", "does not give it: 404", "no data set on the hub")
    for (kind, message), part in zip(errors, expected, strict=True):
        assert kind == "ValueError"
        assert part in message
    copies = [file for file in (tmp_path / "home").rglob("*.jsonl*") if file.is_file()]
    assert not copies


def test_parquet_of_the_hub_is_read(tmp_path):
    files = {"a.parquet": as_parquet(chats("a", "b"))}
    with serve_data_set(write(tmp_path / "hub", **files)) as endpoint:
        code = f"CASES = [{{'path': 'org/chats'}}]\n{HUB}"
        assert json.loads(on_the_hub(endpoint, tmp_path, code)) == [[COMMIT, "a", "b"]]


def test_hub_that_cannot_be_reached_is_an_error_that_says_what_to_do(tmp_path):
    code = f"CASES = [{{'path': 'org/chats'}}]\n{HUB}"
    [[kind, message]] = json.loads(on_the_hub("http://127.0.0.1:9", tmp_path, code))
    assert kind == "RuntimeError"
    assert "'org/chats': no file or folder here, and the hub cannot be reached" in message
    assert "hf download --repo-type dataset org/chats --local-dir FOLDER" in message


# --- what a cache remembers --------------------------------------------------------------------

CHANGES: dict[str, Callable[[Path], object]] = {
    "content": lambda folder: (folder / "a.json").write_bytes(as_json(chats("a", "c"))),
    "one more file": lambda folder: (folder / "c.json").write_bytes(as_json(chats("c"))),
    "one file less": lambda folder: (folder / "b.json").unlink(),
    "name of a file": lambda folder: (folder / "b.json").rename(folder / "c.json"),
    "order of files": lambda folder: (folder / "b.json").rename(folder / "0.json"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_folder_is_a_changed_setting(tmp_path, change):
    write(tmp_path, **{"a.json": as_json(chats("a")), "b.json": as_json(chats("b"))})
    config = DatasetConfig(path=str(tmp_path))
    before = dataset_settings(config)
    assert dataset_settings(config) == before
    CHANGES[change](tmp_path)
    [difference] = settings_differences(dataset_settings(config), before)
    assert difference.startswith("dataset.sha256: ")


def test_file_that_is_not_read_is_no_setting(tmp_path):
    write(tmp_path, **{"train.json": as_json(chats("a")), "test.json": as_json(chats("b"))})
    config = DatasetConfig(path=str(tmp_path))
    before = source_digest(config)
    write(tmp_path, **{"test.json": as_json(chats("c")), "notes.md": b"x"})
    assert source_digest(config) == before


def test_folder_that_was_moved_is_the_same_setting(tmp_path):
    write(tmp_path / "one", **{"a.json": as_json(chats("a"))})
    config = DatasetConfig(path=str(tmp_path / "one"))
    before = dataset_settings(config)
    (tmp_path / "one").rename(tmp_path / "two")
    moved = dataset_settings(replace(config, path=str(tmp_path / "two")))
    assert settings_differences(moved, before) == []
