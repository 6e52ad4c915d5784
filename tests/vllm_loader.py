"""vLLM's own loader of a head, given many sets of tensors in one start.

    python -m tests.vllm_loader TARGET HEAD FOLDER

FOLDER has *.safetensors; result.json says of each the error of vLLM's `load_weights`, or null. They
are given to the module that vLLM has just built for HEAD, in place of the head's own tensors:
afterwards the CPU build packs its weights, and nothing can be loaded any more.
"""

import importlib
import json
import os
import sys
from pathlib import Path

from safetensors.torch import load_file


def main(target: str, head: str, folder: Path) -> None:
    vllm = importlib.import_module("vllm")
    module = importlib.import_module("vllm.model_executor.models.llama_eagle")
    load_weights = module.EagleLlamaForCausalLM.load_weights

    def load_all(self, weights) -> None:
        results = {}
        for file in sorted(folder.glob("*.safetensors")):
            try:
                load_weights(self, iter(load_file(file).items()))
                results[file.stem] = None
            except Exception as error:
                results[file.stem] = f"{type(error).__name__}: {error}"
        (folder / "result.json").write_text(json.dumps(results))
        os._exit(0)  # the engine is not needed

    module.EagleLlamaForCausalLM.load_weights = load_all
    vllm.LLM(
        model=target,
        dtype="float32",
        max_model_len=64,
        enforce_eager=True,
        speculative_config={"method": "eagle", "model": head, "num_speculative_tokens": 1},
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
