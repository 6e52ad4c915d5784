"""A tiny target that answers in letters, a few to some dozen, and ends its replies by itself."""

import string
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.tiny import save_tiny_target, tiny_llama_config, tiny_tokenizer

QUIET = 0.3  # what the layers add, against the token's own embedding


def save_talkative_target(folder: Path, *, seed: int = 0, **changes) -> Path:
    """A random Llama whose likeliest token is the next one in an order of letters and the end.

    Where an answer begins depends on the whole prompt. Greedy answers differ and end.
    """
    config = tiny_llama_config(tie_word_embeddings=False, hidden_size=64, **changes)
    save_tiny_target(folder, config, seed=seed)
    tensors = load_file(folder / "model.safetensors")
    tokenizer = tiny_tokenizer()
    letters = tokenizer.convert_tokens_to_ids(["Ġ", *string.ascii_lowercase])
    order = torch.randperm(len(letters), generator=torch.Generator().manual_seed(seed))
    cycle = [letters[i] for i in order] + [tokenizer.eos_token_id]
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= QUIET
            tensor[0] = 0
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, 0] = 0.5  # the same everywhere, so that the output head's column 0 is a bias
    head = torch.zeros_like(embedding)
    head[:, 0] = -20.0
    for i, (before, after) in enumerate(zip([cycle[-1], *cycle], cycle, strict=False), 1):
        embedding[before, 1:] = 0
        embedding[before, i] = 1.6
        head[after] = 0
        head[after, i] = 3.0
    tensors["lm_head.weight"] = head
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
