"""A small head with a target and prompts to measure it on."""

import json
from pathlib import Path

import torch

from data.chats.prompts import prompt_ids
from data.config import TargetConfig
from data.targets.model import Target, load_target
from tests.heads import export_tiny, trained_head
from train.config import EvaluateConfig

NEW = 12
RECORDS = [
    {"question_id": 1, "category": "colours", "turns": ["red or blue?", "and green?"]},
    {"id": "b", "category": "animals", "prompt": "a cat"},
    {"id": "c", "category": "animals", "messages": [{"role": "user", "content": "the dog says"}]},
    {"id": "d", "prompt": "sun " * 40},
]
OTHERS = [{"question": "two and two?", "answer": "4"}, {"question": "the rain sees", "answer": ""}]


def ids_of(target: Target, text: str) -> torch.Tensor:
    return torch.tensor(prompt_ids(target.tokenizer, [{"role": "user", "content": text}]))


def save_head(folder: Path, target_path: Path) -> Path:
    """An exported head that accepts some drafts, not all."""
    target = load_target(TargetConfig(path=str(target_path), device="cpu"))
    prompts = [ids_of(target, text) for text in ("red or blue?", "a cat", "the dog says")]
    return export_tiny(trained_head(target, prompts, steps=150), target, folder)


def save_prompts(file: Path, records: list[dict]) -> str:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def evaluation(folder: Path, target_path: Path, head_path: Path, **changes) -> EvaluateConfig:
    """Of two sets, of which one has a prompt that is too long."""
    prompts = [
        save_prompts(folder / "chat.jsonl", RECORDS),
        save_prompts(folder / "maths.jsonl", OTHERS),
    ]
    values = dict(
        head=str(head_path),
        target=TargetConfig(path=str(target_path), device="cpu"),
        prompts=prompts,
        max_new_tokens=NEW,
        max_prompt_tokens=150,
        out=str(folder / "out"),
    )
    return EvaluateConfig(**{**values, **changes})
