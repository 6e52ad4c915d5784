"""The dump's second engine: vLLM, which cuts a target over several GPUs and runs quantised ones.

vLLM hands out hidden states by the number of a layer. Number L of a target with L layers enters the
final norm; no number gives what leaves it. So the norm is applied here: the module that
Transformers builds for the target, with the weights of the checkpoint. One engine lives in a
process: vLLM does not start twice. Importing this module imports no vLLM.
"""

import importlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from data.config import TargetConfig
from data.targets.checkpoint_files import locate, open_checkpoint
from data.targets.families import NORMS, load_config, load_tokenizer, model_class, target_dtype
from data.targets.fingerprint import fingerprint
from data.targets.head import read_target_head
from data.targets.model import Target
from data.targets.private_folder import PrivateFolder
from data.targets.vllm_environment import missing_openmp, require_vllm, vllm_environment

log = logging.getLogger(__name__)

NAMED = 20  # tokens a position whose logits vLLM names
CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"


@dataclass
class VllmTarget(Target):
    """A target that vLLM runs; `model` is its LLM. What we compute ourselves is on the CPU.

    The GPUs are the engine's. Norm and copy cost little beside the forward, and the head is needed
    for the check of the first batch and to measure int8 alone.
    """

    norm: nn.Module
    folder: PrivateFolder
    tensor_parallel: int

    @property
    def place(self) -> str:
        return f"vLLM, tensor_parallel={self.tensor_parallel}"

    @torch.no_grad()
    def features(self, input_ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """As of any target; padding is left out, its features are zero."""
        counts = [input_ids.shape[1]] * len(input_ids) if lengths is None else lengths.tolist()
        prompts = [row[:count].tolist() for row, count in zip(input_ids, counts, strict=True)]
        hidden = self.head.embed_tokens.shape[1]
        features = torch.zeros(*input_ids.shape, hidden, dtype=self.dtype)
        for row, states in zip(features, self._hidden_states(prompts), strict=True):
            row[: len(states)] = self.norm(states)
        return features

    def own_logits(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """As of any target: those of the likeliest tokens, as vLLM itself computes them."""
        named = []
        for output in self._generate(input_ids.tolist(), logprobs=NAMED, prompt_logprobs=NAMED):
            # Entry j of the prompt is about the token after j - 1; that after the last is sampled.
            positions = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
            named.append([_likeliest(position) for position in positions])
        tokens, logits = torch.tensor(named, dtype=torch.float64).unbind(-1)  # [B, T, K]
        return tokens.long(), logits.float()

    def _hidden_states(self, prompts: list[list[int]]) -> Iterator[Tensor]:
        """What enters the final norm: [T, H] for each prompt."""
        connector = importlib.import_module(CONNECTORS)
        for prompt, output in zip(prompts, self._generate(prompts), strict=True):
            file = output.kv_transfer_params["hidden_states_path"]
            stored = connector.load_hidden_states(file)
            connector.cleanup_hidden_states(file)
            if stored["token_ids"].tolist() != prompt:
                raise RuntimeError(
                    f"vLLM gave the hidden states of {len(stored['token_ids'])} other tokens for a "
                    f"sequence of {len(prompt)}. Dump with target.engine=transformers."
                )
            yield stored["hidden_states"][:, 0].to(self.dtype)

    def _generate(self, prompts: list[list[int]], **wanted: int) -> list[Any]:
        vllm = importlib.import_module("vllm")
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, **wanted)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.model.generate(inputs, sampling, use_tqdm=False)
        # The file of a request is written in the step after its last one, which nobody would make.
        self.model.llm_engine.step()
        return outputs


def load_vllm_target(config: TargetConfig, *, max_length: int, batch_tokens: int) -> VllmTarget:
    """Start vLLM in this process.

    max_length:   tokens of the longest sequence
    batch_tokens: tokens of a batch; vLLM computes so many in one step

    Raises RuntimeError if vLLM is not installed or does not start, and ValueError for a target that
    it gives no hidden states of.
    """
    location = locate(config)
    if location.gguf_file:
        raise ValueError(
            f"target.engine=vllm reads folders and hub ids, but {config.path} is a GGUF file. Use "
            "target.engine=transformers, or the folder that the file was made from."
        )
    require_vllm()
    loaded = load_config(config)
    dtype = target_dtype(config, loaded)
    on_cpu = not torch.cuda.is_available()
    head, norm = read_target_head(config), final_norm(config, loaded, dtype)
    hidden = head.embed_tokens.shape[1]
    # vLLM writes the states of a whole batch before the first of them is read.
    folder = PrivateFolder(2 * max(batch_tokens, max_length) * hidden * dtype.itemsize)
    _prepare_environment(location.path, on_cpu=on_cpu)
    vllm: Any = importlib.import_module("vllm")
    ours = {
        "kv_connector": "CpuHiddenStatesConnector",
        "kv_connector_module_path": "data.targets.hidden_connector",
    }
    layers = {"eagle_aux_hidden_state_layer_ids": [loaded.get_text_config().num_hidden_layers]}
    try:
        engine = vllm.LLM(
            model=location.path,
            revision=location.revision,
            trust_remote_code=config.trust_remote_code,
            dtype=str(dtype).removeprefix("torch."),
            tensor_parallel_size=config.tensor_parallel,
            skip_tokenizer_init=True,
            enforce_eager=True,  # nothing is decoded, so graphs would be captured for nothing
            enable_prefix_caching=False,  # tokens from its cache would come without states
            async_scheduling=False,
            max_model_len=max_length + 1,  # vLLM decodes one token at least
            max_num_batched_tokens=max(batch_tokens, max_length + 1),
            logprobs_mode="raw_logits",
            max_logprobs=NAMED,
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": layers},
            },
            kv_transfer_config=importlib.import_module("vllm.config").KVTransferConfig(
                **(ours if on_cpu else {"kv_connector": "ExampleHiddenStatesConnector"}),
                kv_role="kv_producer",
                kv_connector_extra_config={"shared_storage_path": str(folder.path)},
            ),
        )
    except (RuntimeError, ValueError, AssertionError) as error:
        raise _explained(config, loaded, error) from error
    return VllmTarget(
        model=engine,
        tokenizer=load_tokenizer(config),
        head=head,
        device=torch.device("cpu"),
        dtype=dtype,
        fingerprint=fingerprint(config),
        norm=norm,
        folder=folder,
        tensor_parallel=config.tensor_parallel,
    )


def final_norm(config: TargetConfig, loaded: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    """The target's final norm: the module of Transformers, the weights of the checkpoint."""
    with torch.device("meta"):  # the whole model, but without memory
        model = model_class(loaded).from_config(
            loaded, dtype=dtype, trust_remote_code=config.trust_remote_code
        )
    norm = model.get_decoder().norm
    checkpoint = open_checkpoint(config)
    name = next((name for name in NORMS if name in checkpoint), None)
    if name is None:
        raise ValueError(f"{config.path} has no tensor {', '.join(NORMS)}.")
    norm.load_state_dict({"weight": checkpoint.read(name).to(dtype)}, assign=True)
    return norm.requires_grad_(False)


def _likeliest(position: dict[int, Any]) -> list[tuple[int, float]]:
    """The NAMED likeliest tokens of a position and their logits. vLLM adds the one that follows."""
    named = sorted(((value.logprob, token) for token, value in position.items()), reverse=True)
    return [(token, logit) for logit, token in named[:NAMED]]


def _prepare_environment(model: str, *, on_cpu: bool) -> None:
    values = vllm_environment(model)
    preload = values.pop("LD_PRELOAD", None)  # too late for this process
    if on_cpu and preload:
        log.info(
            "vLLM is faster on a CPU when the command starts with LD_PRELOAD=%s KMP_BLOCKTIME=0",
            missing_openmp(),
        )
    os.environ.update(values)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it warns of all that we ask for


def _explained(config: TargetConfig, loaded: PretrainedConfig, error: Exception) -> Exception:
    if "EAGLE3" in str(error):
        return ValueError(
            f"vLLM gives no hidden states of {loaded.model_type} models ({error}). Dump with "
            "target.engine=transformers; target.device_map=auto spreads it over several GPUs."
        )
    return RuntimeError(
        f"vLLM does not start with {config.path} (target.tensor_parallel="
        f"{config.tensor_parallel}): {error}\nIf that is about memory: more GPUs "
        "(target.tensor_parallel), GPUs that nothing else uses (CUDA_VISIBLE_DEVICES), a smaller "
        "batch_tokens or max_length. Otherwise dump with target.engine=transformers."
    )
