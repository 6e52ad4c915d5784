"""What each engine can serve for each family of targets that the dump accepts.

    python -m train.serve.families     prints the table as Markdown

The head is the same for all: one Llama layer, LlamaForCausalLM for vLLM and LlamaForCausalLMEagle
for SGLang. What differs is whether the engine hands the target's features over and drafts.
"""

from dataclasses import dataclass

VERSIONS = {"vllm": "0.32", "sglang": "0.5.23"}  # that were looked at
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


NO_LM_HEAD = "object has no attribute 'lm_head'"  # at the first draft: vLLM shares none with it
NO_SHARING = "SGLang's class shares no embeddings"  # it has no get_embed_and_head
NO_CLASS = "SGLang has no class of its own"

SERVED: dict[str, Served] = {
    "apertus": Served(architecture="ApertusForCausalLM"),
    "cohere": Served(
        architecture="CohereForCausalLM", vllm=NO, error=NO_LM_HEAD, sglang=NO, note=NO_SHARING
    ),
    "cohere2": Served(
        architecture="Cohere2ForCausalLM", vllm=NO, error=NO_LM_HEAD, sglang=NO, note=NO_SHARING
    ),
    "ernie4_5": Served(
        architecture="Ernie4_5ForCausalLM",
        note="SGLang knows it as Ernie4_5_ForCausalLM in the target's config.json",
    ),
    "exaone4": Served(architecture="Exaone4ForCausalLM"),
    "gemma": Served(architecture="GemmaForCausalLM", sglang=NO, note=NO_SHARING),
    "gemma2": Served(
        architecture="Gemma2ForCausalLM", vllm=NO, error=NO_LM_HEAD, sglang=NO, note=NO_SHARING
    ),
    "gemma3_text": Served(architecture="Gemma3ForCausalLM"),
    "glm4": Served(architecture="Glm4ForCausalLM"),
    "glm4_moe": Served(architecture="Glm4MoeForCausalLM"),
    "gpt_oss": Served(architecture="GptOssForCausalLM"),
    "granite": Served(architecture="GraniteForCausalLM", sglang=NO, note=NO_SHARING),
    "llama": Served(architecture="LlamaForCausalLM", sglang=RAN),
    "mistral": Served(architecture="MistralForCausalLM"),
    "mixtral": Served(architecture="MixtralForCausalLM", sglang=NO, note=NO_SHARING),
    "olmo2": Served(architecture="Olmo2ForCausalLM", sglang=NO, note=NO_SHARING),
    "olmo3": Served(architecture="Olmo3ForCausalLM", sglang=NO, note=NO_SHARING),
    "phi3": Served(architecture="Phi3ForCausalLM"),
    "qwen2": Served(architecture="Qwen2ForCausalLM"),
    "qwen2_moe": Served(architecture="Qwen2MoeForCausalLM", sglang=NO, note=NO_SHARING),
    "qwen3": Served(architecture="Qwen3ForCausalLM"),
    "qwen3_moe": Served(architecture="Qwen3MoeForCausalLM"),
    "seed_oss": Served(architecture="SeedOssForCausalLM", sglang=NO, note=NO_CLASS),
    "smollm3": Served(architecture="SmolLM3ForCausalLM", sglang=NO, note=NO_CLASS),
}


def unserved(engine: str, family: str) -> str | None:
    """Why an engine cannot serve a head of this family of targets; None if it can."""
    row = SERVED.get(family)
    if engine not in VERSIONS or row is None or getattr(row, engine) != NO:
        return None
    return row.error if engine == "vllm" else row.note


def table() -> str:
    """The table as Markdown."""
    engines = f"vLLM {VERSIONS['vllm']} | SGLang {VERSIONS['sglang']}"
    lines = [f"| family | target class | {engines} | |", "|---|---|---|---|---|"]
    for name, row in SERVED.items():
        notes = [f"vLLM: {row.error}"] if row.error else []
        notes += [row.note] if row.note else []
        cells = (name, f"`{row.architecture}`", row.vllm, row.sglang, "; ".join(notes))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
