"""Lets SGLang's own loader fill its own draft module, and compares the module with the file.

Runs in SGLang's Python: `python -m train.serve.sglang_cpu.load REQUEST RESULT`, both JSON files,
for `train/serve/engine_sglang.py`, which says what they hold. SGLang never tells whether all
parameters were filled: so each is filled with nan first, and must equal the file's tensors after.
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from train.serve.sglang_cpu import stand_ins

# SGLang's parameters that hold several tensors of the file, one after the other.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
SHARED = ("model.embed_tokens.weight", "lm_head.weight")  # the target's own take their place
# Of RoPE's table, whose angles are computed in float32 in another order, and rounded to its dtype.
ROPE_TOLERANCE = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# What an error in a stranger's folder may be. Anything else is a fault here, and keeps its trace.
REFUSALS = (
    *(AssertionError, AttributeError, IndexError, KeyError),
    *(OSError, RuntimeError, TypeError, ValueError),
)


def main() -> None:
    request_file, result_file = map(Path, sys.argv[1:])
    request = json.loads(request_file.read_text(encoding="utf-8"))
    stand_ins.install()
    import sglang

    start(request)
    heads = [check(Path(folder), request) for folder in request["folders"]]
    result = {"version": sglang.__version__, "heads": heads}
    result_file.write_text(json.dumps(result), encoding="utf-8")


def start(request: dict[str, Any]) -> None:
    """What SGLang wants to know before it builds a module: settings, and a group of one process."""
    from sglang.srt.distributed import parallel_state

    server_args(request["target"], request)
    with tempfile.TemporaryDirectory() as folder:
        parallel_state.init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"file://{folder}/store",
            backend="gloo",
        )
        parallel_state.initialize_model_parallel(backend="gloo")


def server_args(target: str, request: dict[str, Any], **settings: Any) -> Any:
    """Publish the arguments of a server on this CPU, as its scheduler does, and return them."""
    from sglang.srt.runtime_context import SpawnRanks, override_platform, publish
    from sglang.srt.server_args import ServerArgs

    # SGLang then keeps its CPU attention, for which there is a stand-in, and EAGLE needs.
    override_platform(has_amx=True).install()
    args = ServerArgs(
        model_path=target,
        revision=request["revision"],
        trust_remote_code=request["trust_remote_code"],
        dtype=request["dtype"],
        device="cpu",
        attention_backend="intel_amx",
        page_size=1,
        skip_tokenizer_init=True,
        log_level="warning",
        **settings,
    )
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    return args


def check(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """What SGLang makes of one head: its problems, and each parameter beside the file's tensors."""
    found: dict[str, Any] = {"folder": str(folder), "problems": [], "parameters": {}}
    problems: list[str] = found["problems"]
    try:
        model, config = load(folder, request, problems)
    except REFUSALS as error:
        problems.append(f"SGLang refuses the folder: {type(error).__name__}: {error}")
        return found
    if not is_eagle(config):
        return found  # another network altogether
    found["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    found["parameters"] = compare(model, read(folder), problems)
    compare_constants(model, request, problems)
    try:
        share_with_target(model)
    except REFUSALS as error:
        problems.append(
            "SGLang stops when it gives the head the target's embedding and output head "
            f"({type(error).__name__}: {error}); tie_word_embeddings is "
            f"{config.tie_word_embeddings} and must be false, also for a tied target"
        )
    return found


def load(folder: Path, request: dict[str, Any], problems: list[str]) -> tuple[nn.Module, Any]:
    """The draft module as SGLang's EAGLE worker gets it, every unfilled number nan."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model
    from sglang.srt.runtime_context import get_server_args

    args = get_server_args()
    target = ModelConfig.from_server_args(args, model_path=request["target"])
    draft = ModelConfig.from_server_args(
        args, model_path=str(folder), is_draft_model=True, context_length=target.context_len
    )
    problems += config_problems(draft, target)
    with poisoned():
        model = get_model(
            model_config=draft, load_config=LoadConfig(), device_config=DeviceConfig("cpu")
        )
    return model, draft.hf_config


def config_problems(draft: Any, target: Any) -> list[str]:
    """What SGLang takes from config.json without a word, and serves otherwise than it should."""
    ours, theirs = draft.hf_config, target.hf_text_config
    problems = []
    if not is_eagle(ours):
        problems.append(
            f"architectures is {ours.architectures}: SGLang builds that model, not an EAGLE head. "
            "Expected LlamaForCausalLMEagle"
        )
    if ours.num_hidden_layers != 1:
        problems.append(f"num_hidden_layers is {ours.num_hidden_layers}, expected 1")
    for key in ("hidden_size", "vocab_size"):
        if getattr(ours, key) != getattr(theirs, key):
            problems.append(f"{key} is {getattr(ours, key)}, the target's {getattr(theirs, key)}")
    if draft.dtype != target.dtype:
        problems.append(
            f"SGLang runs the head in {draft.dtype} and the target in {target.dtype}, and stops at "
            "the first draft: torch_dtype must be the target's"
        )
    return problems


def is_eagle(config: Any) -> bool:
    return config.architectures[0].endswith("ForCausalLMEagle")


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill every parameter with nan between SGLang's building of a module and its loading."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    load_weights = DefaultModelLoader.load_weights_only

    def after_nan(model: nn.Module, weights: Any, device: Any) -> Any:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        return load_weights(model, weights, device)

    DefaultModelLoader.load_weights_only = staticmethod(after_nan)
    try:
        yield
    finally:
        DefaultModelLoader.load_weights_only = staticmethod(load_weights)


def read(folder: Path) -> dict[str, Tensor]:
    """The tensors of the folder, read without SGLang and in its order of preference."""
    if files := sorted(folder.glob("*.safetensors")):
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    files = sorted(folder.glob("*.bin")) or sorted(folder.glob("*.pt"))
    return {k: v for f in files for k, v in torch.load(f, weights_only=True).items()}


def compare(
    model: nn.Module, stored: dict[str, Tensor], problems: list[str]
) -> dict[str, dict[str, Any]]:
    """Hold every parameter against the tensors it should hold, bit for bit."""
    parameters = {n: p.detach() for n, p in model.named_parameters() if n not in SHARED}
    used = {name for name in stored if name.startswith(("embed_tokens.", "lm_head."))}
    compared = {}
    for name, parameter in parameters.items():
        sources = sources_of(name)
        used |= set(sources) & stored.keys()
        missing = [source for source in sources if source not in stored]
        if len(missing) == len(sources) and name.endswith("_proj.bias"):
            continue  # biases of attention start at zero: the same network
        equal = not missing and is_made_of(parameter, [stored[source] for source in sources])
        compared[name] = {"shape": list(parameter.shape), "from": sources, "equal": equal}
        if missing:
            problems.append(
                f"{name} is never filled: the file has no {', '.join(missing)}, and SGLang serves "
                "what the memory held"
            )
        elif not parameter.isfinite().all():
            problems.append(f"{name} holds numbers that are not finite")
        elif not equal:
            shapes = ", ".join(f"{source} {list(stored[source].shape)}" for source in sources)
            problems.append(
                f"{name} {list(parameter.shape)} was cut or padded without a word: the file has "
                f"{shapes}"
            )
    problems += [
        f"{name} is in the file, but SGLang's head has no such parameter: ignored"
        for name in sorted(stored.keys() - used)
    ]
    return compared


def sources_of(parameter: str) -> list[str]:
    """The file's tensors of one of SGLang's parameters, in the order in which they are joined."""
    name = parameter.removeprefix("model.")
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            return [name.replace(fused, part) for part in parts]
    return [name]


def is_made_of(parameter: Tensor, tensors: list[Tensor]) -> bool:
    if len({tensor.shape[1:] for tensor in tensors}) != 1:
        return False
    return torch.equal(parameter, torch.cat(tensors).to(parameter.dtype))


def compare_constants(model: Any, request: dict[str, Any], problems: list[str]) -> None:
    """RoPE's angles and the norm's epsilon: no tensors, and silently others if a key is missing."""
    expected = load_file(request["rope"])  # cos and sin, [P, d/2] float32
    layer = model.model.layers[0]
    table = layer.self_attn.rotary_emb.cos_sin_cache  # [positions, d]: all cos, then all sin
    wanted = torch.cat([expected["cos"], expected["sin"]], dim=-1)
    if table.shape[-1] != wanted.shape[-1]:
        problems.append(f"RoPE turns {table.shape[-1]} numbers of a head, not {wanted.shape[-1]}")
    else:
        shared = min(len(table), len(wanted))
        error = float((table[:shared].float() - wanted[:shared]).abs().max())
        if error > ROPE_TOLERANCE[table.dtype]:
            problems.append(
                f"RoPE's table differs from the target's by up to {error:.3g} in the first "
                f"{shared} positions (base {layer.self_attn.rotary_emb.base}): rope_theta, "
                "rope_parameters or rope_scaling are not as trained"
            )
    epsilon = float(layer.post_attention_layernorm.variance_epsilon)
    if abs(epsilon / request["epsilon"] - 1) > 1e-3:
        problems.append(f"rms_norm_eps is {epsilon:g}, the target's {request['epsilon']:g}")


def share_with_target(model: Any) -> None:
    """What SGLang's EAGLE worker does once both models are loaded."""
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    model.set_embed_and_head(*(nn.Parameter(torch.zeros_like(x)) for x in (embedding, head)))


if __name__ == "__main__":
    main()
