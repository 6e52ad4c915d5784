import json
from pathlib import Path

import pytest

from data.config import DatasetConfig, HeldoutPromptsConfig
from data.prompts import Prompt, heldout_prompts, prompt_ids, read_prompts
from data.split import is_heldout
from tests.templates import TEMPLATES, byte_level
from tests.tiny import save_tiny_chats, tiny_chats

USER = {"role": "user", "content": "hello"}


def write(file: Path, *lines: dict | str) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(texts), encoding="utf-8")
    return file


def test_all_three_forms_are_read(tmp_path):
    history = [USER, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "bye"}]
    file = write(
        tmp_path / "p.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["hello", "go on"], "reference": []},
        "",
        {"id": "b", "messages": history},
        {"prompt": "hello"},
    )
    assert read_prompts(file, limit=None) == [
        Prompt("81", "writing", [USER], ["go on"]),
        Prompt("b", "", history, []),
        Prompt("4", "", [USER], []),
    ]
    assert len(read_prompts(file, limit=2)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"p\.jsonl:2 is not JSON"),
        ("[]", r"p\.jsonl:2 is a list; expected one JSON object a line"),
        ({"text": "a"}, r"p\.jsonl:2 has 'text', but no prompt"),
        ({}, r"p\.jsonl:2 has nothing"),
        ({"prompt": " "}, r"p\.jsonl:2 has 'prompt', but no prompt"),
        ({"turns": []}, r"p\.jsonl:2 has 'turns'"),
        ({"turns": ["a", 5]}, r"p\.jsonl:2 has 'turns'"),
        ({"messages": [USER, {"role": "assistant", "content": "a"}]}, r"end with the user"),
        ({"messages": [{"role": "human", "content": "a"}]}, r"p\.jsonl:2 has 'messages'"),
        ({"messages": [{"role": "user"}]}, r"p\.jsonl:2 has 'messages'"),
        ({"id": 1, "prompt": "b"}, r"p\.jsonl:2: the id '1' was used before"),
    ],
)
def test_line_without_a_prompt_is_named(tmp_path, line, message):
    file = write(tmp_path / "p.jsonl", {"prompt": "a"}, line)
    with pytest.raises(ValueError, match=message):
        read_prompts(file, limit=None)


def test_missing_and_empty_files_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        read_prompts(tmp_path / "none.jsonl", limit=None)
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(write(tmp_path / "p.jsonl", "", ""), limit=None)


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
