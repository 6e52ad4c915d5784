"""Llama as a target, and the draft classes that serve an EAGLE-1 head."""

from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle
from sglang.srt.models.qwen2_eagle import Qwen2ForCausalLMEagle

EntryClass = [LlamaForCausalLM, LlamaForCausalLMEagle, Qwen2ForCausalLMEagle]
