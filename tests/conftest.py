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


@pytest.fixture(scope="session")
def cache_path(tmp_path_factory, target_path, chats_path) -> Path:
    """A finished feature cache of the tiny target over the small chats."""
    from data.config import DatasetConfig, DumpConfig, TargetConfig
    from data.dump.run import dump

    config = DumpConfig(
        target=TargetConfig(path=str(target_path)),
        dataset=DatasetConfig(path=str(chats_path)),
        out=str(tmp_path_factory.mktemp("cache") / "features"),
        shard_tokens=1000,
    )
    return dump(config)


@pytest.fixture(scope="session")
def cache(cache_path):
    from data.cache.reader import FeatureCache

    return FeatureCache(cache_path)


@pytest.fixture(scope="session")
def run_path(tmp_path_factory, target_path) -> Path:
    """A run of the tiny target with one checkpoint of an untrained head."""
    from tests.runs import save_tiny_run

    return save_tiny_run(tmp_path_factory.mktemp("export") / "run", target_path)


@pytest.fixture(scope="session")
def tiny_target_and_head(target_path):
    """The tiny target, loaded, and an untrained head for it."""
    from data.config import TargetConfig
    from data.targets.model import load_target
    from tests.heads import random_head

    target = load_target(TargetConfig(path=str(target_path), device="cpu"))
    return target, random_head(target)


@pytest.fixture(scope="session")
def head_path(tmp_path_factory, target_path) -> Path:
    """The export of a small head of the tiny target that accepts some drafts."""
    from tests.evaluations import save_head

    return save_head(tmp_path_factory.mktemp("head"), target_path)
