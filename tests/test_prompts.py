import gzip
import json
from pathlib import Path

import pytest

from data.chats.prompts import Prompt, heldout_prompts, prompt_ids, read_prompt_sets, read_prompts
from data.chats.split import is_heldout
from data.config import DatasetConfig, HeldoutPromptsConfig
from tests.templates import TEMPLATES, byte_level
from tests.tiny import save_tiny_chats, tiny_chats

USER = {"role": "user", "content": "hello"}


def write(file: Path, *lines: dict | str) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(texts), encoding="utf-8")
    return file


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def test_every_form_is_recognised_by_its_keys(tmp_path):
    history = [USER, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "bye"}]
    code = 'def f(x):\n    """One more."""\n'
    file = write(
        tmp_path / "p.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["hello", "go on"], "reference": []},
        "",
        {"id": "b", "messages": history},
        {"prompt": "hello"},
        {"task_id": "HumanEval/0", "prompt": f"\n{code}", "entry_point": "f", "test": "assert f"},
        {"question": "How many?", "answer": "Two. #### 2"},
        {"instruction": "Sort these.", "input": "3, 1", "output": "1, 3"},
        {"instruction": "Say a word.", "input": "", "output": "Word"},
        '"hello"',
    )

    assert read_prompts(file, limit=None) == [
        Prompt("81", "writing", [USER], ["go on"]),
        Prompt("b", "", history, []),
        Prompt("4", "", [USER], []),
        Prompt(
            "HumanEval/0", "", user("Complete this Python function:\n\n" + code.rstrip("\n")), []
        ),
        Prompt("6", "", user("How many?"), []),
        Prompt("7", "", user("Sort these.\n\n3, 1"), []),
        Prompt("8", "", user("Say a word."), []),
        Prompt("9", "", [USER], []),
    ]
    assert len(read_prompts(file, limit=2)) == 2


def test_arrays_lines_and_gzip_hold_the_same_prompts(tmp_path):
    records = [{"prompt": "a\u2028b"}, {"prompt": "c"}]
    expected = [Prompt("1", "", user("a\u2028b"), []), Prompt("2", "", user("c"), [])]
    lines = write(tmp_path / "p.jsonl", *(json.dumps(r, ensure_ascii=False) for r in records))
    (tmp_path / "array.json").write_text("\n" + json.dumps(records, indent=1))
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    for name in ("p.jsonl", "array.json", "packed.jsonl.gz"):
        assert read_prompts(tmp_path / name, limit=None) == expected
    plain = write(tmp_path / "p.txt", '{"prompt": "not json here"}', "", "c")
    assert [p.messages for p in read_prompts(plain, limit=None)] == [
        user('{"prompt": "not json here"}'),
        user("c"),
    ]


def test_sets_are_named_after_their_files(tmp_path):
    write(tmp_path / "b.jsonl", {"prompt": "b"}, {"prompt": "c"})
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}'))
    write(tmp_path / "README.md", "no prompts")
    other = write(tmp_path / "new" / "b.jsonl", {"prompt": "d"})
    assert list(read_prompt_sets(str(tmp_path), limit=None)) == ["a", "b"]
    assert len(read_prompt_sets([str(tmp_path)], limit=1)["b"]) == 1
    named = read_prompt_sets({"chat": str(tmp_path / "b.jsonl"), "code": str(other)}, limit=None)
    assert [p.messages[0]["content"] for p in named["code"]] == ["d"]
    with pytest.raises(ValueError, match=r"two sets called b: .*b\.jsonl and .*new/b\.jsonl"):
        read_prompt_sets([str(tmp_path), str(other)], limit=None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"p\.jsonl:2 is not JSON"),
        ("5", r"p\.jsonl:2 is a int; expected a record with"),
        ({"text": "a"}, r"p\.jsonl:2 has 'text', but no prompt"),
        ({}, r"p\.jsonl:2 has nothing"),
        ({"prompt": " "}, r"p\.jsonl:2 has 'prompt', but no prompt"),
        ({"prompt": 5, "entry_point": "f"}, r"p\.jsonl:2 has 'prompt', 'entry_point', but no"),
        ({"question": None}, r"p\.jsonl:2 has 'question'"),
        ({"instruction": "", "input": "a"}, r"p\.jsonl:2 has 'instruction', 'input'"),
        ({"turns": []}, r"p\.jsonl:2 has 'turns'"),
        ({"turns": ["a", 5]}, r"p\.jsonl:2 has 'turns'"),
        ({"messages": [USER, {"role": "assistant", "content": "a"}]}, r"is the user's"),
        ({"messages": [{"role": "human", "content": "a"}]}, r"p\.jsonl:2 has 'messages'"),
        ({"messages": [{"role": "user"}]}, r"p\.jsonl:2 has 'messages'"),
        ({"id": 1, "prompt": "b"}, r"p\.jsonl:2: the id '1' was used before"),
    ],
)
def test_record_without_a_prompt_is_named(tmp_path, line, message):
    file = write(tmp_path / "p.jsonl", {"prompt": "a"}, line)
    with pytest.raises(ValueError, match=message):
        read_prompts(file, limit=None)


def test_missing_and_empty_files_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        read_prompts(tmp_path / "none.jsonl", limit=None)
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(write(tmp_path / "p.jsonl", "", ""), limit=None)
    with pytest.raises(ValueError, match="holds no prompt file"):
        read_prompt_sets(str(write(tmp_path / "new" / "p.md", "a").parent), limit=None)
    (tmp_path / "p.jsonl").write_bytes(b"\x1f\x8b cut")
    with pytest.raises(ValueError, match="no text in UTF-8, gzipped or not"):
        read_prompts(tmp_path / "p.jsonl", limit=None)


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompt_ids_are_those_of_the_chat_endpoint(name):
    tokenizer = byte_level(TEMPLATES[name], merges=True)
    expected = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    assert prompt_ids(tokenizer, [USER]) == expected


def test_system_prompt_joins_the_user_where_the_template_has_no_place_for_it():
    tokenizer = byte_level(TEMPLATES["gemma"], merges=True)
    messages = [{"role": "system", "content": "Be kind."}, USER]
    joined = [{"role": "user", "content": "Be kind.\n\nhello"}]
    assert prompt_ids(tokenizer, messages) == prompt_ids(tokenizer, joined)


def test_heldout_prompts_are_the_first_questions_of_chats_that_training_leaves_out(tmp_path):
    chats = save_tiny_chats(tmp_path / "chats.json", 60)
    dataset = DatasetConfig(path=str(chats))
    config = HeldoutPromptsConfig(
        dataset=dataset, out=str(tmp_path / "new" / "p.jsonl"), share=0.3, seed=4
    )
    prompts = read_prompts(heldout_prompts(config), limit=None)
    records = {record["id"]: record for record in json.loads(chats.read_text())}
    assert [p.id for p in prompts] == [i for i in records if is_heldout(i, share=0.3, seed=4)]
    for prompt in prompts:
        first = records[prompt.id]["conversations"][0]["value"]
        assert prompt.messages == [{"role": "user", "content": first}]
    config.limit = 3
    assert read_prompts(heldout_prompts(config), limit=None) == prompts[:3]


def test_the_parts_of_a_long_chat_give_one_prompt(tmp_path):
    parts = [record | {"id": f"a_b_{i}"} for i, record in enumerate(tiny_chats(5))]
    (tmp_path / "chats.json").write_text(json.dumps(parts))
    config = HeldoutPromptsConfig(
        dataset=DatasetConfig(path=str(tmp_path / "chats.json")),
        out=str(tmp_path / "p.jsonl"),
        share=1.0,
    )
    assert [p.id for p in read_prompts(heldout_prompts(config), limit=None)] == ["a_b_0"]


def test_no_heldout_chat_is_an_error(tmp_path):
    dataset = DatasetConfig(path=str(save_tiny_chats(tmp_path / "chats.json", 4)))
    config = HeldoutPromptsConfig(dataset=dataset, out=str(tmp_path / "p.jsonl"), share=0.0)
    with pytest.raises(ValueError, match=r"None of the 4 conversations.*Take a larger share"):
        heldout_prompts(config)
    assert not (tmp_path / "p.jsonl").exists()
