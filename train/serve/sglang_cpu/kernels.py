"""What SGLang imports as `sgl_kernel`: its CPU kernels, as slow and plain PyTorch.

Names, arguments and in-place results are those that SGLang 0.5.23 expects; unused arguments stand
for layouts and options that a dense Llama in float32 or bfloat16 does not need.
"""

from typing import Any

import torch

from train.serve.sglang_cpu.attention import decode_attention_cpu, extend_attention_cpu
from train.serve.sglang_cpu.slots import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from train.serve.sglang_cpu.trees import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "decode_attention_cpu",
    "extend_attention_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]
__version__ = "0+stand-in"


def install_ops() -> None:
    """The two that SGLang finds in torch.ops instead of in this module."""
    ops: Any = torch.ops.sgl_kernel
    ops.decode_attention_cpu = decode_attention_cpu
    ops.extend_attention_cpu = extend_attention_cpu
