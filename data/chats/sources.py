"""Where chats come from: a file, a folder, or a data set on the hub; read record by record."""

import contextlib
import hashlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from data.chats.records import read_records
from data.config import DatasetConfig
from data.files import sha256

log = logging.getLogger(__name__)

JSON = (".json", ".jsonl", ".ndjson")
READABLE = (*JSON, *(f"{suffix}.gz" for suffix in JSON), ".parquet")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
ORIGIN = ".origin.json"  # says where the chats beside it come from
ROWS = 256  # parquet rows in memory at a time
BUFFER = 1 << 20  # bytes of a parquet column that are read at a time


def source_records(config: DatasetConfig) -> Iterator[Any]:
    """Yield the records of a file, of all files of a folder's split, or of a hub data set's split.

    Holds a few megabytes at a time and stores nothing, however large the files are.

    Raises FileNotFoundError; ValueError for what cannot be read or does not exist; RuntimeError if
    the hub cannot be reached.
    """
    path = _local(config)
    if path is not None and path.is_file():
        files = [str(path)]
    else:
        splits = _splits(config, path)
        if path is not None:
            _warn_left_out(path, splits)
        files = _split_files(config, splits)
        log.info("chats: split %s of %s: %s", config.split, config.path, _listed(files))
    for name in files:
        with _open(name, config) as file:
            if name.endswith(".parquet"):
                yield from _parquet_rows(file, name)
            else:
                yield from read_records(file, name, allow_truncated=config.allow_truncated)


def source_digest(config: DatasetConfig) -> str:
    """What identifies the records: another digest where a file or the hub data set was changed.

    sha256 of a file, or of the names and contents of a folder's files; the commit on the hub.
    Raises as `source_records` does.
    """
    path = _local(config)
    if path is None:
        return _commit(config)
    if path.is_file():
        return sha256(path)
    digest = hashlib.sha256()
    for file in _split_files(config, _splits(config, path)):
        digest.update(f"{Path(file).relative_to(path.resolve())}\0{sha256(Path(file))}\n".encode())
    return digest.hexdigest()


def _local(config: DatasetConfig) -> Path | None:
    """The file or folder that is meant; None for a hub id."""
    path = Path(config.path).expanduser()
    if path.is_file() and (config.split != "train" or config.name or config.revision):
        raise ValueError(
            f"dataset.path is the file {path}, which is read whole: it has no split, name or "
            "revision to choose. Leave dataset.split, dataset.name and dataset.revision out."
        )
    if path.exists():
        return path
    if config.path.endswith((*READABLE, ".gz")) or not HUB_ID.fullmatch(config.path):
        raise FileNotFoundError(f"dataset.path is {path}, but there is no such file or folder.")
    return None


def _splits(config: DatasetConfig, folder: Path | None) -> dict[str, list[str]]:
    """The files of each split of a folder, or of a hub data set, as `datasets` finds them."""
    from datasets import load_dataset_builder  # takes seconds

    if folder is not None:
        _check_not_saved(folder)
    place = config.path if folder is None else str(folder.resolve())
    commit = _commit(config) if folder is None else None
    try:
        with _hub(config):
            builder = load_dataset_builder(place, config.name, revision=commit)
    except FileNotFoundError as error:
        found = error if folder is None else _listed(sorted(map(str, folder.iterdir())))
        raise ValueError(
            f"{config.path} holds nothing that can be read. Expected files that end with "
            f"{', '.join(READABLE)}; found {found}."
        ) from error
    except ValueError as error:
        problem = str(error).partition("\nExample")[0].replace("\n", " ")
        raise ValueError(
            f"{config.path} cannot be read: {problem} (dataset.name=... chooses a subset.)"
        ) from error
    return {str(name): list(files) for name, files in (builder.config.data_files or {}).items()}


def _split_files(config: DatasetConfig, splits: dict[str, list[str]]) -> list[str]:
    if config.split not in splits:
        raise ValueError(
            f"{config.path} has no split {config.split!r}, but {', '.join(map(repr, splits))}. "
            "Choose one with dataset.split=..."
        )
    files = sorted(file for file in splits[config.split] if not file.endswith(ORIGIN))
    if other := [file for file in files if not file.endswith(READABLE)]:
        raise ValueError(
            f"Split {config.split!r} of {config.path} is {_listed(other)}. Expected files that end "
            f"with {', '.join(READABLE)}."
        )
    return files


def _check_not_saved(folder: Path) -> None:
    if any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        raise ValueError(
            f"{folder} was written by `save_to_disk` of the datasets library. Write a parquet file "
            'with it instead: `python -c "import datasets; datasets.load_from_disk('
            f"'{folder}').to_parquet('chats.parquet')\"` (with ['train'] before .to_parquet if it "
            "has splits)."
        )


def _warn_left_out(folder: Path, splits: dict[str, list[str]]) -> None:
    used = {file for files in splits.values() for file in files}
    files = (str(file) for file in folder.resolve().rglob("*") if not file.name.startswith("."))
    left = [f for f in files if f.endswith(READABLE) and f not in used and not f.endswith(ORIGIN)]
    if left:
        log.warning(
            "%s: left out %s, as `datasets` takes them for no part of a split. Name such a file "
            "alone (dataset=FILE), or put files of one kind into a folder of their own.",
            folder,
            _listed(sorted(left)),
        )


def _commit(config: DatasetConfig) -> str:
    """The commit of a hub data set that `dataset.revision` stands for now."""
    from huggingface_hub import HfApi

    if re.fullmatch("[0-9a-f]{40}", config.revision or ""):
        return str(config.revision)
    with _hub(config):
        return str(HfApi().dataset_info(config.path, revision=config.revision, timeout=30).sha)


@contextlib.contextmanager
def _open(name: str, config: DatasetConfig) -> Iterator[BinaryIO]:
    if not name.startswith("hf://"):
        with Path(name).open("rb") as file:
            yield file
        return
    from huggingface_hub import HfFileSystem

    with _hub(config), HfFileSystem().open(name, "rb") as file:
        yield file


@contextlib.contextmanager
def _hub(config: DatasetConfig) -> Iterator[None]:
    """Say what it means, and what to do, where the hub does not answer as it should."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError

    what = f"dataset.path is {config.path!r}: no file or folder here"
    try:
        yield
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{what}, and no data set on the hub that you may see. Correct the name, or log in "
            "(`hf auth login`) if it is private."
        ) from error
    except HfHubHTTPError as error:
        raise ValueError(f"{what}, and the hub does not give it: {error}") from error
    except FileNotFoundError:
        raise
    except (OSError, HTTPError) as error:  # HTTPError: of the HTTP library that the hub's uses
        raise RuntimeError(
            f"{what}, and the hub cannot be reached to ask for it ({error}). Correct the path; or "
            f"run `hf download --repo-type dataset {config.path} --local-dir FOLDER` where there "
            "is a network, and give dataset=FOLDER."
        ) from error


def _parquet_rows(file: BinaryIO, name: str) -> Iterator[Any]:
    import pyarrow.parquet as pq  # comes with datasets, whose own reader holds whole row groups

    number = 0
    try:
        reader = pq.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False)
        for batch in reader.iter_batches(batch_size=ROWS):
            for row in batch.to_pylist():
                number += 1
                yield row
    except (ValueError, OSError) as error:  # Arrow's own errors are ValueErrors
        raise ValueError(
            f"{name} is no parquet file that can be read, or damaged after record {number}: {error}"
        ) from error


def _listed(files: list[str]) -> str:
    names = [Path(file).name for file in files]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(names[:5]) or "nothing") + more
