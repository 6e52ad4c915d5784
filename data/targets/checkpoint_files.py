"""Reads single tensors from a checkpoint without loading the model that they belong to."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.config import TargetConfig

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class Location:
    """A target's place, in the words that Transformers' `from_pretrained` understands."""

    path: str  # folder, or hub id
    gguf_file: str | None = None  # file name inside it
    revision: str | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of every `from_pretrained`."""
        given = {"gguf_file": self.gguf_file, "revision": self.revision}
        return {key: value for key, value in given.items() if value is not None}


def locate(config: TargetConfig) -> Location:
    """Where the target is: a folder, a `.gguf` file, a hub id, or `ORG/NAME/FILE.gguf` on the hub.

    Raises FileNotFoundError if a local folder holds no config.json.
    """
    path = Path(config.path).expanduser()
    if path.suffix == ".gguf":
        return Location(str(path.parent), path.name, config.revision)
    if not path.exists():
        if config.path.count("/") > 1 or config.path.startswith((".", "/", "~")):
            raise FileNotFoundError(
                f"There is no folder {path} (and it is no hub id). Give target=PATH with the "
                "folder of a checkpoint, a .gguf file, or a hub id such as ORG/NAME."
            )
        return Location(config.path, None, config.revision)
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise ValueError(
            f"{path} holds an adapter, not a model. Merge it into its base model first "
            "(`merge_and_unload()` of peft, then `save_pretrained`) and give that folder: the "
            "features must be those of the model that is served."
        )
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"{path} has no config.json. Expected the folder of a Transformers checkpoint "
            "(config.json, tokenizer, weights), or the path of a .gguf file itself."
        )
    return Location(str(path), None, config.revision)


@contextlib.contextmanager
def explained(location: Location, what: str) -> Iterator[None]:
    """Turn the OSError by which Transformers reports a missing file into a FileNotFoundError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FileNotFoundError(f"Cannot read the {what} of {location.path}: {error}") from error


@dataclass(frozen=True)
class Checkpoint:
    """The weight files of a target; tensors are read one by one."""

    location: Location
    files: dict[str, str]  # tensor name -> name of the file that holds it
    _paths: dict[str, Path] = field(default_factory=dict)  # of the files used: found once

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def read(self, name: str) -> Tensor:
        """The whole tensor, in the dtype of the file (float32 from GGUF)."""
        file = self._path(self.files[name])
        if file.suffix == ".gguf":
            return _read_gguf(_gguf_tensors(file)[name])
        if file.suffix == ".bin":
            return _load_bin(file)[name]
        from safetensors import safe_open

        with safe_open(file, framework="pt") as f:
            return f.get_tensor(name)

    def sample(self, name: str) -> bytes:
        """The first row as the file stores it: enough to tell two checkpoints apart."""
        file = self._path(self.files[name])
        if file.suffix == ".gguf":
            return _gguf_tensors(file)[name].data[:1].tobytes()
        if file.suffix == ".bin":
            row = _load_bin(file)[name][:1]
        else:
            from safetensors import safe_open

            with safe_open(file, framework="pt") as f:
                piece = f.get_slice(name)
                row = piece[:1] if piece.get_shape() else f.get_tensor(name)
        return row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    def gguf_type(self) -> str:
        """The type, such as Q4_K, that most matrices of a GGUF file are stored in."""
        tensors = _gguf_tensors(self._path(str(self.location.gguf_file))).values()
        types = Counter(t.tensor_type.name for t in tensors if len(t.shape) > 1)
        return types.most_common(1)[0][0]

    def _path(self, file: str) -> Path:
        if file not in self._paths:
            self._paths[file] = _require(self.location, file)
        return self._paths[file]


def open_checkpoint(config: TargetConfig) -> Checkpoint:
    """Find the weights: sharded or single, safetensors, .bin or GGUF, local or on the hub.

    Raises FileNotFoundError that lists the names tried.
    """
    location = locate(config)
    if location.gguf_file is not None:
        file = _require(location, location.gguf_file)
        return Checkpoint(location, dict.fromkeys(_gguf_tensors(file), location.gguf_file))
    # Transformers prefers one safetensors file, then its index, then the same of .bin.
    for single, index in zip(SINGLES, INDEXES, strict=True):
        if (found := _find(location, single)) is not None:
            return Checkpoint(location, dict.fromkeys(_names(found), single))
        if (found := _find(location, index)) is not None:
            return Checkpoint(location, json.loads(found.read_text("utf-8"))["weight_map"])
    raise FileNotFoundError(
        f"{location.path} holds no weights. Looked for {', '.join(SINGLES + INDEXES)}."
    )


def _names(file: Path) -> list[str]:
    if file.suffix == ".bin":
        return list(_load_bin(file))
    from safetensors import safe_open

    with safe_open(file, framework="pt") as f:
        return list(f.keys())


def _require(location: Location, name: str) -> Path:
    file = _find(location, name)
    if file is None:
        raise FileNotFoundError(f"{location.path} has no file {name}.")
    return file


def _find(location: Location, name: str) -> Path | None:
    """The local path of one file, downloaded if the location is on the hub; None if absent."""
    from transformers.utils import cached_file

    with explained(location, f"file {name}"):
        file = cached_file(
            location.path,
            name,
            revision=location.revision,
            _raise_exceptions_for_missing_entries=False,
        )
    return None if file is None else Path(file)


def _load_bin(file: Path) -> dict[str, Tensor]:
    # Mapped, so that reading one tensor does not read the file; never a pickle with code in it.
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


@lru_cache(maxsize=1)  # reading the header, with its vocabulary, takes seconds
def _gguf_tensors(file: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    return {tensor.name: tensor for tensor in GGUFReader(file).tensors}


def _read_gguf(tensor: Any) -> Tensor:
    from gguf import dequantize

    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
