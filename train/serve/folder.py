"""Any head's folder as it lies there, ours or a stranger's: config.json, tensors, who made it."""

import json
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from data.files import read_json, sha256

RECORD = "eagle_head.json"  # what `export_head` writes beside the two files that engines read
KINDS = (".safetensors", ".bin", ".pt")  # engines read all files of the first kind that is there


@dataclass(frozen=True, kw_only=True)
class HeadFolder:
    """What engines find, under the names that the files have; nothing is mended here."""

    path: Path
    keys: dict[str, Any]  # config.json
    tensors: dict[str, Tensor]
    files: list[str]  # weights files, in the order in which engines read them
    twice: list[str] = field(default_factory=list)  # tensors that more than one file holds
    missing_files: list[str] = field(default_factory=list)  # shards that the index names
    record: dict[str, Any] | None = None  # eagle_head.json
    altered: bool = False  # whether the weights are others than the record was written for


def head_folder(place: str) -> Path:
    """A local folder as it is; a hub id as the folder that the hub's cache has or gets of it.

    Raises FileNotFoundError if there is neither.
    """
    path = Path(place).expanduser()
    if path.exists():
        return path
    if place.count("/") != 1 or place.startswith((".", "/", "~")):
        raise FileNotFoundError(
            f"There is no folder {place} (and it is no hub id). Give the folder of a head "
            "(config.json and its weights), or a hub id such as ORG/NAME."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", *(f"*{kind}" for kind in KINDS)]
        return Path(snapshot_download(place, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"There is no folder {place}, and the hub gives no such head: {error}"
        ) from error


def read_folder(path: Path) -> HeadFolder:
    """Read a folder with config.json and weights: safetensors or .bin, one file or several.

    Raises FileNotFoundError without config.json, ValueError for files that cannot be read and for
    a .bin with more than tensors in it, which is never run.
    """
    if not (path / "config.json").is_file():
        there = (
            ", ".join(sorted(f.name for f in path.iterdir())[:8]) if path.is_dir() else "no folder"
        )
        raise FileNotFoundError(
            f"{path} holds no head: it has no config.json (there: {there or 'nothing'}). Expected "
            "an exported or published head, config.json and its weights."
        )
    keys = read_json(path / "config.json", made_by="python -m scripts.export_head")
    if not isinstance(keys, dict):
        raise ValueError(f"{path / 'config.json'} is no JSON object, but a {type(keys).__name__}.")
    files = _weights_files(path)
    tensors: dict[str, Tensor] = {}
    twice: list[str] = []
    for name in files:
        loaded = _load(path / name)
        twice += sorted(tensors.keys() & loaded.keys())
        tensors |= loaded
    record = None
    if (path / RECORD).is_file():
        record = read_json(path / RECORD, made_by="python -m scripts.export_head")
    known = (record or {}).get("weights_sha256")
    return HeadFolder(
        path=path,
        keys=keys,
        tensors=tensors,
        files=files,
        twice=twice,
        missing_files=_missing_shards(path),
        record=record,
        altered=known is not None and [sha256(path / name) for name in files] != [known],
    )


def _weights_files(path: Path) -> list[str]:
    for kind in KINDS:
        if found := sorted(f.name for f in path.iterdir() if f.suffix == kind):
            return found
    return []


def _load(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} holds more than tensors; loading it would run code ({error}). Convert it to "
            "safetensors where it is trusted."
        ) from error
    except (SafetensorError, EOFError, RuntimeError) as error:
        raise ValueError(f"{file} cannot be read ({error}). Is it complete?") from error
    if not isinstance(loaded, dict) or not all(isinstance(t, Tensor) for t in loaded.values()):
        raise ValueError(f"{file} is no table of tensors by name, as engines expect.")
    return loaded


def _missing_shards(path: Path) -> list[str]:
    missing: set[str] = set()
    for index in path.glob("*.index.json"):
        named = set(json.loads(index.read_text("utf-8")).get("weight_map", {}).values())
        missing |= {name for name in named if not (path / name).is_file()}
    return sorted(missing)
