"""A dump as published trainers write it: the yardstick for ours, which nothing else uses.

One conversation at a time in the order of the file, the whole target with its output head, the most
likely token and its probability at every position, and a file of `torch.save` for each.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from data.chats.tokens import Tokens
from data.targets.model import Target


@torch.no_grad()
def plain_dump(
    target: Target, tokens: Tokens, sequences: Iterable[int], folder: Path, *, dtype: torch.dtype
) -> None:
    """Write one file for each of `sequences`, numbered by how many files there are.

    dtype: of the stored features. Ours too, so that both write as many bytes
    """
    for index in sequences:
        rows = slice(*tokens.offsets[index : index + 2].tolist())
        input_ids = tokens.input_ids[rows].long()[None].to(target.device)  # [1, T]
        outputs = target.model(input_ids, output_hidden_states=True)
        probs = outputs.logits.float().softmax(dim=-1)  # [1, T, V]
        outputs.logits.argmax(dim=-1), probs.amax(dim=-1)
        sample = {
            "input_ids": input_ids[0].cpu(),
            "hidden_state": outputs.hidden_states[-1][0].to(dtype).cpu(),  # [T, H]
            "loss_mask": tokens.loss_mask[rows].long(),
        }
        torch.save(sample, plain_file(folder, len(list(folder.iterdir()))))


def plain_file(folder: Path, number: int) -> Path:
    return folder / f"data_{number}.ckpt"


def read_plain(folder: Path, number: int) -> dict[str, Any]:
    return torch.load(plain_file(folder, number), weights_only=True)
