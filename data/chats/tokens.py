"""All tokens of a dump: rendered before the target runs, kept in files instead of in memory."""

import contextlib
import logging
import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from data.cache.reader import save_tensors
from data.chats.conversations import Counts, read_conversations
from data.chats.rendering import render_all
from data.config import DumpConfig
from data.files import sha256

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tokens:
    """All sequences of a plan, one after the other."""

    input_ids: Tensor  # [N] int32
    loss_mask: Tensor  # [N] bool
    offsets: Tensor  # [S+1] int64

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()


def tokenise(tokenizer: Any, config: DumpConfig, folder: Path) -> tuple[list[str], Tokens, Counts]:
    """Read and render all conversations. Sequences in which nothing is supervised are left out.

    The tokens are mapped from files of `folder` that have no name, and vanish with the process.

    Raises ValueError with the counts by reason if none is left.
    """
    counts = Counts()
    ids: list[str] = []
    lengths = array("q")
    conversations = read_conversations(config.dataset, counts)
    sequences = render_all(tokenizer, conversations, max_length=config.max_length, counts=counts)
    with _unnamed(folder) as id_file, _unnamed(folder) as mask_file:
        for sequence in tqdm(sequences, desc="tokenise", unit=" chats", delay=1):
            ids.append(sequence.id)
            lengths.append(len(sequence.input_ids))
            id_file.write(array("i", sequence.input_ids).tobytes())
            mask_file.write(bytes(sequence.loss_mask))
        if not ids:
            raise ValueError(
                f"No supervised token in {config.dataset.path} (max_length {config.max_length}): "
                f"no conversation has two tokens of one reply to learn from.\n{counts.summary()}"
            )
        offsets = np.zeros(len(ids) + 1, dtype=np.int64)
        np.cumsum(np.frombuffer(lengths, dtype=np.int64), out=offsets[1:])
        tokens = Tokens(
            _mapped(id_file, np.dtype(np.int32)),
            _mapped(mask_file, np.dtype(bool)),
            torch.from_numpy(offsets),
        )
    return ids, tokens, counts


def save_tokens(file: Path, tokens: Tokens) -> str:
    """Write all tokens by rename. Returns the checksum."""
    save_tensors(file, vars(tokens))
    return sha256(file)


def load_tokens(file: Path) -> Tokens:
    """What `save_tokens` wrote, memory-mapped."""
    return Tokens(**load_file(file))


@contextlib.contextmanager
def _unnamed(folder: Path) -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile(dir=folder, buffering=2**20) as file:
        yield file


def _mapped(file: IO[bytes], dtype: np.dtype) -> Tensor:
    file.flush()
    return torch.from_numpy(np.memmap(file, dtype=dtype, mode="r+"))
