import pytest

from data.files import atomic_folder, atomic_write, read_json, write_json


def test_a_file_that_failed_leaves_what_was_there(tmp_path):
    file = tmp_path / "a.json"
    write_json(file, [1])
    with pytest.raises(RuntimeError, match="broken"), atomic_write(file) as tmp:
        tmp.write_text("half")
        raise RuntimeError("broken")
    assert read_json(file, made_by="x") == [1]
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_that_failed_leaves_what_was_there(tmp_path):
    folder = tmp_path / "a"
    with atomic_folder(folder) as tmp:
        (tmp / "old").write_text("old")
    with pytest.raises(RuntimeError, match="broken"), atomic_folder(folder) as tmp:
        (tmp / "new").write_text("half")
        raise RuntimeError("broken")
    assert [f.name for f in folder.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [folder]


def test_a_new_folder_replaces_the_old_one_whole(tmp_path):
    folder = tmp_path / "a"
    for name in ("old", "new"):
        with atomic_folder(folder) as tmp:
            (tmp / name).write_text(name)
            (tmp / name).chmod(0o600)  # as safetensors leaves it
    assert [f.name for f in folder.iterdir()] == ["new"]
    assert (folder / "new").stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [folder]


def test_a_missing_or_broken_record_names_the_command_that_writes_it(tmp_path):
    file = tmp_path / "a.json"
    with pytest.raises(FileNotFoundError, match=r"a\.json does not exist.*python -m scripts\.x"):
        read_json(file, made_by="python -m scripts.x")
    file.write_text("{")
    with pytest.raises(ValueError, match=r"a\.json is not valid JSON.*python -m scripts\.x"):
        read_json(file, made_by="python -m scripts.x")
