from pathlib import Path

import pytest

from tests.tiny import save_tiny_chats, save_tiny_target


@pytest.fixture(scope="session")
def target_path(tmp_path_factory) -> Path:
    """Folder of a tiny random Llama target with a byte tokenizer."""
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def chats_path(tmp_path_factory) -> Path:
    """A ShareGPT file of 24 small chats."""
    return save_tiny_chats(tmp_path_factory.mktemp("chats") / "chats.json")
