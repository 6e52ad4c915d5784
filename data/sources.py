"""Where chats come from: a file, a folder, or a data set on the hub; read record by record."""

import hashlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from data.config import DatasetConfig
from data.files import sha256
from data.records import read_records

log = logging.getLogger(__name__)

JSON = (".json", ".jsonl", ".ndjson")
READABLE = ".json, .jsonl (each also .gz) or .parquet"
# No hub id: what is meant is a file that is not there.
FILE_NAME = re.compile(r".*\.(json|jsonl|ndjson|gz|parquet)|[./~].*|.*/.*/.*")
ORIGIN = ".origin.json"  # says where the chats beside it come from
ROWS = 256  # parquet rows in memory at a time


def source_records(config: DatasetConfig) -> Iterator[Any]:
    """Yield the records of a file, of all files of a folder's split, or of a hub data set's split.

    JSON is read by `data.records`, everything else by the `datasets` library; neither holds more
    than a few megabytes or stores anything.

    Raises FileNotFoundError; ValueError for what cannot be read or does not exist; RuntimeError if
    the hub cannot be reached.
    """
    path = _local(config)
    if path is not None and path.is_file() and path.suffix != ".parquet":
        with path.open("rb") as file:
            yield from read_records(file, str(path), allow_truncated=config.allow_truncated)
        return
    builder, files = _data_set(config, path)
    log.info("chats: %s, of %s: %s", config.split, config.path, _listed(files))
    if all(_is_json(file) for file in files):
        for name in files:
            with _open(name) as part:
                yield from read_records(part, name, allow_truncated=config.allow_truncated)
    else:
        yield from _rows(builder, config)


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
    _, files = _data_set(config, path)
    digest = hashlib.sha256()
    for file in files:
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
    if FILE_NAME.fullmatch(config.path):
        raise FileNotFoundError(f"dataset.path is {path}, but there is no such file or folder.")
    return None


def _commit(config: DatasetConfig) -> str:
    """The commit of a hub data set that `dataset.revision` stands for now."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError

    if re.fullmatch("[0-9a-f]{40}", config.revision or ""):
        return str(config.revision)
    what = f"dataset.path is {config.path!r}: there is no such file or folder here"
    try:
        commit = HfApi().dataset_info(config.path, revision=config.revision, timeout=30).sha
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{what}, and no such data set on the hub that you may see. Correct the name, or log "
            "in (`hf auth login`) if it is private."
        ) from error
    except HfHubHTTPError as error:
        raise ValueError(f"{what}, and the hub refuses it: {error}") from error
    except (OSError, HTTPError) as error:  # HTTPError: of the HTTP library that the hub's uses
        raise RuntimeError(
            f"{what}, and the hub cannot be reached to ask for it ({error}). Correct the path; or "
            f"run `hf download --repo-type dataset {config.path} --local-dir FOLDER` where there "
            "is a network, and give dataset=FOLDER."
        ) from error
    return str(commit)


def _data_set(config: DatasetConfig, path: Path | None) -> tuple[Any, list[str]]:
    """What `datasets` makes of a folder, a parquet file or a hub id; the files of the split."""
    from datasets import load_dataset_builder  # takes seconds

    if path is not None and path.is_dir():
        _check_not_saved(path)
    try:
        if path is None:
            builder = load_dataset_builder(config.path, config.name, revision=_commit(config))
        elif path.is_file():
            builder = load_dataset_builder("parquet", data_files=str(path.resolve()))
        else:
            builder = load_dataset_builder(str(path.resolve()), config.name)
    except FileNotFoundError as error:
        names = sorted(p.name for p in path.iterdir()) if path is not None else []
        found = _listed(names) if path is not None else str(error)
        raise ValueError(
            f"{config.path} holds nothing that can be read. Expected {READABLE} files, found "
            f"{found}."
        ) from error
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"{config.path} cannot be read: {error}\n(dataset.name chooses one of several subsets.)"
        ) from error
    splits = {str(name): list(files) for name, files in (builder.config.data_files or {}).items()}
    if config.split not in splits:
        raise ValueError(
            f"{config.path} has no split {config.split!r}, but {', '.join(map(repr, splits))}. "
            "Choose one with dataset.split=..."
        )
    if hasattr(builder.config, "batch_size"):
        builder.config.batch_size = ROWS  # else a whole row group, which may be the whole file
    return builder, sorted(file for file in splits[config.split] if not file.endswith(ORIGIN))


def _check_not_saved(folder: Path) -> None:
    if any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        raise ValueError(
            f"{folder} was written by `save_to_disk` of the datasets library. Write a parquet file "
            'with it instead: `python -c "import datasets; datasets.load_from_disk('
            f"'{folder}').to_parquet('chats.parquet')\"` (and ['train'] before .to_parquet if it "
            "has splits)."
        )


def _is_json(file: str) -> bool:
    return file.removesuffix(".gz").endswith(JSON)


def _open(file: str) -> BinaryIO:
    if not file.startswith("hf://"):
        return Path(file).open("rb")
    from huggingface_hub import HfFileSystem

    return HfFileSystem().open(file, "rb")


def _rows(builder: Any, config: DatasetConfig) -> Iterator[Any]:
    from huggingface_hub.errors import HTTPError

    number = 0
    try:
        for row in builder.as_streaming_dataset(split=config.split):
            number += 1
            yield row
    except (ValueError, OSError, HTTPError) as error:  # Arrow's errors are ValueErrors
        kind = ValueError if isinstance(error, ValueError) else RuntimeError
        raise kind(
            f"{config.path} cannot be read on after record {number}: {type(error).__name__}: "
            f"{error}"
        ) from error


def _listed(files: list[str]) -> str:
    names = [Path(file).name for file in files]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(names[:5]) or "nothing") + more
