import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from data.chats.conversations import Counts, read_conversations
from data.chats.rendering import render_all
from data.chats.tokens import load_tokens, save_tokens, tokenise
from data.config import DatasetConfig, DumpConfig, TargetConfig
from tests.tiny import save_tiny_chats, tiny_tokenizer

GOOD = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]


def config_of(file: Path, **dump) -> DumpConfig:
    dataset = DatasetConfig(path=str(file))
    return DumpConfig(TargetConfig(path="none"), dataset, out="none", **dump)


def test_tokens_are_the_sequences_one_after_the_other(tmp_path):
    config = config_of(save_tiny_chats(tmp_path / "chats.json"), max_length=100)
    tokenizer = tiny_tokenizer()
    conversations = read_conversations(config.dataset, Counts())
    sequences = list(render_all(tokenizer, conversations, max_length=100, counts=Counts()))
    ids, tokens, _ = tokenise(tokenizer, config, tmp_path)
    assert ids == [sequence.id for sequence in sequences]
    for index, sequence in enumerate(sequences):
        rows = slice(*tokens.offsets[index : index + 2].tolist())
        assert tokens.input_ids[rows].tolist() == sequence.input_ids
        assert tokens.loss_mask[rows].tolist() == sequence.loss_mask
    assert tokens.offsets[-1] == len(tokens.input_ids) == len(tokens.loss_mask)


def test_saved_tokens_are_what_was_tokenised(tmp_path):
    config = config_of(save_tiny_chats(tmp_path / "chats.json"))
    _, tokens, _ = tokenise(tiny_tokenizer(), config, tmp_path)
    save_tokens(tmp_path / "tokens.safetensors", tokens)
    loaded = load_tokens(tmp_path / "tokens.safetensors")
    for name, tensor in vars(tokens).items():
        assert torch.equal(getattr(loaded, name), tensor)
        assert getattr(loaded, name).dtype == tensor.dtype


def test_tokens_lie_in_no_file_that_stays(tmp_path):
    config = config_of(save_tiny_chats(tmp_path / "chats.json"))
    folder = tmp_path / "out"
    folder.mkdir()
    tokenise(tiny_tokenizer(), config, folder)
    assert not list(folder.iterdir())


def test_chats_without_a_supervised_token_are_an_error_with_the_counts(tmp_path):
    config = config_of(save_tiny_chats(tmp_path / "chats.json", 5), max_length=8)
    with pytest.raises(ValueError, match=r"(?s)No supervised.*max_length 8.*5  no reply within"):
        tokenise(tiny_tokenizer(), config, tmp_path)


IDS: dict[str, Callable[[int], object]] = {
    "distinct": lambda i: f"chat{i}_0",
    "all the same": lambda i: "chat_0",
}


@pytest.mark.parametrize("kind", IDS)
def test_memory_and_time_are_in_proportion_to_the_number_of_chats(tmp_path, kind):
    tokenizer = tiny_tokenizer()
    peaks, seconds = [], []
    few, many = 1000, 6000
    for number in (100, few, many):  # the first warms up
        file = tmp_path / f"{number}.jsonl"
        chats = ({"id": IDS[kind](i), "conversations": GOOD} for i in range(number))
        file.write_text("\n".join(map(json.dumps, chats)))
        began = time.process_time()
        tracemalloc.start()
        ids, _, counts = tokenise(tokenizer, config_of(file), tmp_path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        seconds.append(time.process_time() - began)
        assert len(set(ids)) == counts.used == number
    bytes_each = (peaks[2] - peaks[1]) / (many - few)
    assert bytes_each < 300  # an id, its place in two tables, a length; no text and no tokens
    assert seconds[2] / seconds[1] < 3 * many / few
