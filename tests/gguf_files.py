"""A tiny Llama as llama.cpp stores it: its names, its order of rotated rows, its tokenizer."""

from pathlib import Path

import gguf
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def save_gguf(folder: Path, file: Path, kind: str) -> Path:
    """Write the Llama in `folder` as a GGUF file whose matrices are stored as `kind`."""
    config = LlamaConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, folder)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem.endswith(tuple(heads)):
            tensor = _interleaved(tensor, heads[stem.rpartition(".")[2]])
        as_stored = gguf.GGMLQuantizationType[kind if tensor.dim() > 1 else "F32"]
        data = gguf.quantize(tensor.numpy(), as_stored)
        writer.add_tensor(f"{_gguf_name(stem)}.weight", data, raw_dtype=as_stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _gguf_name(stem: str) -> str:
    if stem in NAMES:
        return NAMES[stem]
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}"


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows that rotate together beside each other, as llama.cpp wants them."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_scores([-1.0] * len(tokens))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
