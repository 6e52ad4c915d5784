"""Small real models and chats, made on the spot: the tests need no network and no checkpoint."""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast

from data.targets.families import model_class

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tiny_tokenizer(chat_template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a byte, plus the special ones: any text can be encoded and decoded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        additional_special_tokens=SPECIAL,
    )
    fast.chat_template = chat_template
    return fast


def tiny_llama_config(**changes) -> LlamaConfig:
    values = dict(
        vocab_size=len(SPECIAL) + 256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        initializer_range=0.2,  # wide enough for distributions that are not flat
    )
    return LlamaConfig(**{**values, **changes})


def save_tiny_target(
    folder: Path, config: PretrainedConfig | None = None, *, seed: int = 0, **save
) -> Path:
    """Write a random target (Llama unless `config` says otherwise) with its tokenizer."""
    torch.manual_seed(seed)
    config = config or tiny_llama_config()
    model = model_class(config).from_config(config, dtype=torch.float32)
    model.save_pretrained(folder, **save)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_chats(count: int = 24, *, seed: int = 0) -> list[dict]:
    """Chats in the ShareGPT dialect, one to three exchanges each."""
    rng = random.Random(seed)
    words = "red green blue one two three cat dog sun rain goes sees says the a".split()

    def sentence() -> str:
        return " ".join(rng.choices(words, k=rng.randint(2, 8)))

    chats = []
    for i in range(count):
        turns = []
        for _ in range(rng.randint(1, 3)):
            turns.append({"from": "human", "value": sentence() + "?"})
            turns.append({"from": "gpt", "value": sentence().capitalize() + "."})
        chats.append({"id": f"chat{i}_0", "conversations": turns})
    return chats


def save_tiny_chats(file: Path, count: int = 24, *, seed: int = 0) -> Path:
    file.write_text(json.dumps(tiny_chats(count, seed=seed)), encoding="utf-8")
    return file
