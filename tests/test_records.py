import gzip
import io
import json
import os
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest

from data.chats.conversations import Counts, read_conversations
from data.chats.records import read_records
from data.config import DatasetConfig
from tests.tiny import tiny_chats

ROOT = Path(__file__).parent.parent
CHATS = tiny_chats(3)
LAYOUTS = {
    "array": json.dumps(CHATS).encode(),
    "lines": "\n".join(map(json.dumps, CHATS)).encode() + b"\n",
}


def read(content: bytes, *, allow_truncated: bool = False) -> list:
    return list(read_records(io.BytesIO(content), "a.json", allow_truncated=allow_truncated))


# --- gzip --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("parts", [1, 2, 7])
def test_gzip_is_seen_from_the_content_in_one_part_or_several(layout, parts):
    text = LAYOUTS[layout]
    cut = [len(text) * i // parts for i in range(parts + 1)]
    packed = b"".join(gzip.compress(text[a:b]) for a, b in pairwise(cut))
    assert read(packed) == CHATS
    assert read(packed + b"\0" * 100) == CHATS  # as tape and block tools pad it


@pytest.mark.parametrize("text", LAYOUTS)
def test_first_record_may_be_the_one_that_is_cut_off(text):
    for length in range(2, LAYOUTS[text].index(b"}]}") + 2):
        with pytest.raises(ValueError, match=r"[Rr]ecord 1.* is cut off"):
            read(LAYOUTS[text][:length])
        assert read(LAYOUTS[text][:length], allow_truncated=True) == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("level", [0, 9])
def test_gzip_that_is_cut_off_is_an_error_or_gives_what_is_whole(layout, level):
    packed = gzip.compress(LAYOUTS[layout], compresslevel=level)
    most = 0
    for length in range(2, len(packed)):
        with pytest.raises(ValueError, match=r"a\.json.* is cut off"):
            read(packed[:length])
        whole = read(packed[:length], allow_truncated=True)
        assert whole == CHATS[: len(whole)]
        most = max(most, len(whole))
    assert most == 3  # only the end of the gzip file itself is missing


def test_gzip_that_is_damaged_is_an_error_whatever_may_be_missing():
    packed = bytearray(gzip.compress(LAYOUTS["lines"], compresslevel=0))
    packed[len(packed) // 2] ^= 1
    with pytest.raises(ValueError, match=r"The gzip file a\.json is damaged after record \d"):
        read(bytes(packed), allow_truncated=True)


def test_what_is_packed_is_looked_at_like_any_file():
    with pytest.raises(ValueError, match=r"a\.json is an HTML page"):
        read(gzip.compress(b"<html>"))


# --- files that are something else -------------------------------------------------------------


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.json", "[]")
    return buffer.getvalue()


OTHERS = {
    "zip": (zipped(), r"a\.json is a zip archive\. Unpack it"),
    "parquet": (b"PAR1\x15\x04", r"a\.json is a parquet file\. Name it \.parquet"),
    "bzip2": (b"BZh91AY&SY", r"a\.json is a bzip2 file"),
    "zstd": (b"\x28\xb5\x2f\xfd\x04", r"a\.json is a Zstandard file"),
    "lfs": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
        r"a\.json is a Git LFS pointer and not the data\. Fetch it: `git lfs pull`",
    ),
    "html": (b"\n<!DOCTYPE html>\n<html><body>404</body></html>", r"a\.json is an HTML page"),
    "utf-16": (json.dumps(CHATS).encode("utf-16"), r"in UTF-16, expected UTF-8.*iconv"),
    "utf-16 without a mark": (json.dumps(CHATS).encode("utf-16-be"), r"in UTF-16"),
    "zeros": (b"\0" * 5000, r"a\.json is a binary file"),
    "csv": (b"id,text\n1,hello\n", r"a\.json:1 \(record 1\) is not JSON.*Expected a JSON array"),
    "empty": (b"", r"a\.json is empty"),
    "empty but packed": (gzip.compress(b""), r"a\.json is empty"),
    "nested deeply": (b"[" * 100_000, r"Record 1 of the array in a\.json is not JSON"),
    "long number": (b'[{"id": ' + b"9" * 5000 + b"}]", r"Record 1 .* in a\.json is not JSON"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_file_that_is_something_else_is_named_as_what_it_is(kind):
    content, message = OTHERS[kind]
    with pytest.raises(ValueError, match=message):
        read(content, allow_truncated=True)


PRETTY = json.dumps(CHATS[0], indent=2)
OBJECTS = {
    "list in an object": (
        json.dumps({"version": 1, "data": CHATS}),
        r"""one JSON object and nothing else, with 'version', 'data'\. .*`jq -c '\."data"\[\]' a""",
    ),
    "list in an object over lines": (
        json.dumps({"version": 1, "data": CHATS}, indent=1),
        r"""one JSON object over several lines, with 'version', 'data'\. .*`jq -c '\."data"\[\]'""",
    ),
    "one chat over lines": (
        PRETTY,
        r"one JSON object over several lines, with 'id', 'conversations'\. .*`jq -c \. a\.json",
    ),
    "several chats over lines": (
        f"{PRETTY}\n{PRETTY}",
        r".* over several lines.*`jq -c \. a\.json",
    ),
    "longer than one look": (
        json.dumps({"data": CHATS * 4000}, indent=1),
        r"one JSON object over several lines, with 'data'\. .*`jq -c '\.\"data\"\[\]'",
    ),
    "no list": (json.dumps({"text": "a"}), r"one JSON object and nothing else, with 'text'\. Exp"),
    "chats by id": (
        json.dumps({"a": CHATS[0], "b": 1}),
        r".* and nothing else, with 'a', 'b'\. Ex",
    ),
}


@pytest.mark.parametrize("case", OBJECTS)
def test_object_where_a_list_was_expected_is_named_with_its_keys_and_what_to_do(case):
    text, message = OBJECTS[case]
    with pytest.raises(ValueError, match=rf"(?s)a\.json is {message}"):
        read(text.encode())


def test_line_that_is_broken_is_not_taken_for_an_object_over_lines():
    with pytest.raises(ValueError, match=r"a\.json:1 \(record 1\) is not JSON"):
        read(b'{"id": "a", "conversations": ]\n{"id": "b", "conversations": []}\n')


# --- records of another shape ------------------------------------------------------------------

TURNS = [{"speaker": "A", "text": "hello"}, {"speaker": "B", "text": "hi"}]
SHAPES = {
    "list of lists": ([[c] for c in CHATS], r"3  record is a list  \(record 1, record 2, "),
    "list of texts": (["hello"] * 3, r"3  record is a text"),
    "other keys": (
        [{"id": "x", "dialog": [], "n": 1}],
        r"1  no list \"conversations\" or \"messages\"  "
        r"\(x has 'id' \(a text\), 'dialog' \(a list\), 'n' \(a number\)\)",
    ),
    "turns packed as text": (
        [{"conversations": json.dumps(TURNS)}],
        r"\(record 1 has 'conversations' \(a text\)\)",
    ),
    "other keys in the turns": (
        [{"id": "x", "conversations": TURNS}],
        r"cut off before a turn without a speaker, with 'speaker' \(a text\), 'text' \(a text\)",
    ),
}


@pytest.mark.parametrize("layout", ["array", "lines"])
@pytest.mark.parametrize("shape", SHAPES)
def test_records_of_another_shape_are_shown_as_they_are(tmp_path, shape, layout):
    records, message = SHAPES[shape]
    if layout == "lines" and shape != "list of lists":  # a line that is a list is an array
        text = "\n".join(map(json.dumps, [*records, *records]))
        message = message.replace("3  rec", "6  rec").replace("1  no", "2  no")
        message = message.replace(r"\)\)", r"\)")
    else:
        text = json.dumps(records)
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=rf"100% of the records of .*a\.json(?s:.*){message}"):
        list(read_conversations(DatasetConfig(path=str(tmp_path / "a.json")), Counts()))


def test_folder_is_not_taken_for_a_file(tmp_path: Path):
    with pytest.raises(ValueError, match="holds nothing that can be read"):
        list(read_conversations(DatasetConfig(path=str(tmp_path)), Counts()))


# --- memory ------------------------------------------------------------------------------------

READ = """
import re, resource, sys
from pathlib import Path
from data.config import DatasetConfig
from data.chats.conversations import Counts, read_conversations

def peak():
    status = Path("/proc/self/status")
    if status.exists():  # there ru_maxrss starts at the peak of whoever started the process
        return 1024 * int(re.search(r"VmHWM:\\s+([0-9]+)", status.read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

before = peak()
number = sum(1 for _ in read_conversations(DatasetConfig(path=sys.argv[1]), Counts()))
print(number, peak() - before)
"""


@pytest.mark.parametrize("layout", ["array", "lines", "packed"])
def test_memory_does_not_grow_with_the_file(tmp_path, layout):
    """CHATS_MB=642 tries the size of the largest public ShareGPT file."""
    megabytes = int(os.environ.get("CHATS_MB", "60"))
    turns = [{"from": "human", "value": "x" * 5000}, {"from": "gpt", "value": "y" * 5000}]
    chat = json.dumps({"conversations": turns}).encode()
    number = megabytes * 1_000_000 // len(chat)
    opened = gzip.open if layout == "packed" else open
    with opened(tmp_path / "a.json", "wb") as file:
        file.write(b"[" if layout == "array" else b"")
        for i in range(number):
            file.write(b"" if i == 0 else b"," if layout == "array" else b"\n")
            file.write(chat)
        file.write(b"]" if layout == "array" else b"")
    # A process of its own, as memory that was ever taken counts for good.
    command = [sys.executable, "-c", READ, str(tmp_path / "a.json")]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert int(output.split()[0]) == number
    assert int(output.split()[1]) < 30e6
