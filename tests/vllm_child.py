"""Features from vLLM in a process of its own: vLLM starts only once in one.

    python -m tests.vllm_child TARGET IN.safetensors OUT.safetensors TENSOR_PARALLEL

IN has input_ids [B, T] and lengths [B]; OUT gets features [B, T, H] and `refused`, 1 if the check
of the output head refuses features from a wrong norm. The folder of the exchange is printed.
"""

import sys

import torch
from safetensors.torch import load_file, save_file

from data.config import TargetConfig
from data.targets.model import check_output_head
from data.targets.vllm_features import load_vllm_target


def main(path: str, given: str, out: str, tensor_parallel: str) -> None:
    batch = load_file(given)
    input_ids, lengths = batch["input_ids"], batch["lengths"]
    config = TargetConfig(path=path, engine="vllm", tensor_parallel=int(tensor_parallel))
    target = load_vllm_target(config, max_length=input_ids.shape[1], batch_tokens=64)
    features = target.features(input_ids, lengths)
    check_output_head(target, input_ids)
    torch.nn.init.constant_(target.norm.weight, 0.3)
    try:
        check_output_head(target, input_ids)
        refused = 0
    except ValueError:
        refused = 1
    save_file({"features": features, "refused": torch.tensor(refused)}, out)
    print(target.folder.path)


if __name__ == "__main__":
    main(*sys.argv[1:])
