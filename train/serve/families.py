"""What each engine can serve for each family of targets that the dump accepts.

    python -m train.serve.families     prints the table as Markdown

The head is the same for all: one Llama layer, LlamaForCausalLM for vLLM and LlamaForCausalLMEagle
for SGLang. What differs is whether the engine hands the target's features over and drafts.
"""

from dataclasses import dataclass

RAN = "yes"  # ran here, with a tiny random target of the family: equal outputs and features
READ = "yes (read)"  # seen in the engine's source only
NO = "no"


@dataclass(frozen=True, kw_only=True)
class Served:
    """One family in both engines."""

    architecture: str  # of the target, as its config.json says
    vllm: str = RAN
    sglang: str = READ
    note: str = ""
    error: str = ""  # what vLLM says where it cannot


SERVED: dict[str, Served] = {
    "apertus": Served(architecture="ApertusForCausalLM"),
    "cohere": Served(architecture="CohereForCausalLM"),
    "cohere2": Served(architecture="Cohere2ForCausalLM"),
    "ernie4_5": Served(architecture="Ernie4_5ForCausalLM"),
    "exaone4": Served(architecture="Exaone4ForCausalLM"),
    "gemma": Served(architecture="GemmaForCausalLM", sglang=NO),
    "gemma2": Served(
        architecture="Gemma2ForCausalLM",
        vllm=NO,
        sglang=NO,
        error="object has no attribute 'lm_head'",
    ),
    "gemma3_text": Served(architecture="Gemma3ForCausalLM"),
    "glm4": Served(architecture="Glm4ForCausalLM"),
    "glm4_moe": Served(architecture="Glm4MoeForCausalLM"),
    "gpt_oss": Served(architecture="GptOssForCausalLM"),
    "granite": Served(architecture="GraniteForCausalLM", sglang=NO),
    "llama": Served(architecture="LlamaForCausalLM"),
    "mistral": Served(architecture="MistralForCausalLM"),
    "mixtral": Served(architecture="MixtralForCausalLM", sglang=NO),
    "olmo2": Served(architecture="Olmo2ForCausalLM", sglang=NO),
    "olmo3": Served(architecture="Olmo3ForCausalLM", sglang=NO),
    "phi3": Served(architecture="Phi3ForCausalLM"),
    "qwen2": Served(architecture="Qwen2ForCausalLM"),
    "qwen2_moe": Served(architecture="Qwen2MoeForCausalLM", sglang=NO),
    "qwen3": Served(architecture="Qwen3ForCausalLM"),
    "qwen3_moe": Served(architecture="Qwen3MoeForCausalLM"),
    "seed_oss": Served(architecture="SeedOssForCausalLM"),
    "smollm3": Served(architecture="SmolLM3ForCausalLM"),
}


def table() -> str:
    """The table as Markdown."""
    lines = ["| family | target class | vLLM 0.32 | SGLang 0.5.23 | |", "|---|---|---|---|---|"]
    for name, row in SERVED.items():
        lines.append(f"| {name} | `{row.architecture}` | {row.vllm} | {row.sglang} | {row.note} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
