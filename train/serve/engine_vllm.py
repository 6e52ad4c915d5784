"""Greedy decoding by real vLLM, in a child process of its own.

vLLM does not start twice in one process, and on a CPU it needs an environment that is set before
Python starts. The parent writes a request file; the child runs `python -m train.serve.engine_vllm
REQUEST RESULT`, tells its stages on standard output and writes the result file. Importing this
module imports no vLLM.
"""

import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data.files import read_json, write_json
from data.targets.vllm_environment import require_vllm, vllm_environment

log = logging.getLogger(__name__)

STAGE = "::stage:: "  # opens the lines of the child's output that the parent repeats
REAL_TOKENS = 1  # beyond the first, when the head is run alone: without them nothing is drafted
NAMES = {
    "drafts": "vllm:spec_decode_num_drafts",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "accepted_per_step": "vllm:spec_decode_num_accepted_tokens_per_pos",
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the child is asked to decode."""

    model: str  # target: hub id or folder
    revision: str | None
    trust_remote_code: bool
    dtype: str  # float32, bfloat16 or float16
    head: str | None  # exported folder; None: without speculation
    num_steps: int
    sets: list[list[list[int]]]  # token ids of the prompts of each set
    max_new_tokens: int
    stop_ids: list[int]
    max_model_len: int
    # Here the child writes what the engine's own module makes of the first prompt: input_ids [T],
    # positions [T], features [T, H] and output [T, H].
    parity: str | None = None


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Over all prompts of a set, before answers are cut."""

    drafts: int = 0  # verified drafts, which are the rounds
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_step: list[int] = field(default_factory=list)  # rounds that accepted step n

    def __sub__(self, earlier: "Counters") -> "Counters":
        before = earlier.accepted_per_step or [0] * len(self.accepted_per_step)
        return Counters(
            drafts=self.drafts - earlier.drafts,
            draft_tokens=self.draft_tokens - earlier.draft_tokens,
            accepted_tokens=self.accepted_tokens - earlier.accepted_tokens,
            accepted_per_step=[a - b for a, b in zip(self.accepted_per_step, before, strict=True)],
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the child answered, for each set."""

    tokens: list[list[list[int]]]  # of each prompt, the stop token included
    seconds: list[float]  # decoding only
    version: str
    counters: list[Counters]


def run_vllm(request: Request, folder: Path, *, name: str) -> Result:
    """Decode in a child process; its request, result and log are kept as FOLDER/NAME.*.

    Raises RuntimeError with the end of the log if the engine dies.
    """
    require_vllm()
    folder.mkdir(parents=True, exist_ok=True)
    files = {kind: folder / f"{name}.{kind}" for kind in ("request.json", "result.json", "log")}
    files["result.json"].unlink(missing_ok=True)
    write_json(files["request.json"], asdict(request))
    command = [sys.executable, "-m", "train.serve.engine_vllm"]
    command += [str(files["request.json"]), str(files["result.json"])]
    with files["log"].open("wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | _environment(request),
            start_new_session=True,
        )
        try:
            status = _wait(child, files["log"], name=name)
        finally:
            _stop(child)
    if status != 0 or not files["result.json"].is_file():
        raise RuntimeError(_death(status, files["log"]))
    answer = read_json(files["result.json"], made_by="python -m scripts.check_export")
    counters = [Counters(**one) for one in answer.pop("counters")]
    return Result(**answer, counters=counters)


def _environment(request: Request) -> dict[str, str]:
    """What the child's environment adds to ours."""
    path = os.pathsep.join(p for p in (_root(), os.environ.get("PYTHONPATH")) if p)
    return {**vllm_environment(request.model), "PYTHONPATH": path}


def _root() -> str:
    return str(Path(__file__).parents[2])


def _wait(child: subprocess.Popen, output: Path, *, name: str) -> int:
    """Repeat the child's stages until it ends; between them say that it is still alive."""
    start = told = time.monotonic()
    stage = "starting Python"
    with output.open("r", encoding="utf-8", errors="replace") as lines:
        while True:
            status = child.poll()
            new = [line[len(STAGE) :].strip() for line in lines if line.startswith(STAGE)]
            now = time.monotonic()
            if new or now - told > 15:
                stage, told = new[-1] if new else stage, now
                log.info("vLLM %-14s %4.0f s  %s", name, now - start, stage)
            if status is not None:
                return status
            time.sleep(0.5)


def _stop(child: subprocess.Popen) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)  # its own session: the child and what it started
        child.wait()


def _death(status: int, output: Path) -> str:
    text = output.read_text(encoding="utf-8", errors="replace")
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    message = f"vLLM ended with {how}. The end of {output}:\n\n"
    message += "\n".join(f"    {line}" for line in text.splitlines()[-30:])
    if "torchvision::nms" in text:
        message += (
            "\n\nThis torchvision does not fit the installed PyTorch, and text models do not need "
            "it: pip uninstall -y torchvision torchaudio torchcodec"
        )
    if status == -signal.SIGKILL:
        message += "\n\nA process that is killed like this has mostly run out of memory."
    return message


def main(request_file: Path, result_file: Path) -> None:
    """The child: everything from here on runs with vLLM."""
    request = Request(**json.loads(request_file.read_text(encoding="utf-8")))
    _tell("importing vLLM")
    vllm: Any = importlib.import_module("vllm")

    _tell(f"starting the engine {'with' if request.head else 'without'} the head")
    speculative = {
        "method": "eagle",
        "model": request.head,
        "num_speculative_tokens": request.num_steps,
    }
    engine = vllm.LLM(
        model=request.model,
        revision=request.revision,
        trust_remote_code=request.trust_remote_code,
        dtype=request.dtype,
        max_model_len=request.max_model_len,
        enforce_eager=True,
        enable_prefix_caching=False,  # every prompt is computed whole, as we do
        disable_log_stats=False,  # the counters are statistics
        speculative_config=speculative if request.head else None,
    )
    if request.head and request.parity:
        _tell("running the head alone")
        _capture(engine, vllm, request.sets[0][0], Path(request.parity))
    sampling = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=request.max_new_tokens,
        # Exactly our stop tokens: vLLM's own are switched off, ours include them.
        ignore_eos=True,
        stop_token_ids=request.stop_ids,
        detokenize=False,
    )
    tokens, seconds, counters = [], [], []
    before = _counters(engine) if request.head else Counters()
    for number, prompts in enumerate(request.sets, start=1):
        _tell(f"decoding {len(prompts)} prompts, set {number} of {len(request.sets)}")
        start = time.perf_counter()
        outputs = engine.generate(
            [{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False
        )
        seconds.append(time.perf_counter() - start)
        tokens.append([list(output.outputs[0].token_ids) for output in outputs])
        now = _counters(engine) if request.head else Counters()
        counters.append(now - before)
        before = now
    result = Result(tokens=tokens, seconds=seconds, version=vllm.__version__, counters=counters)
    write_json(result_file, asdict(result))
    _tell(f"done, {sum(seconds):.1f} s of decoding")


def _capture(engine: Any, vllm: Any, prompt: list[int], file: Path) -> None:
    """Write what goes into the engine's module of the head, and out of it, for one prompt."""
    core = engine.llm_engine.engine_core.engine_core
    module = core.model_executor.driver_worker.worker.model_runner.drafter.model
    seen: list[dict[str, Any]] = []

    def keep(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if seen:
            return
        # Copies: the engine writes the next step into the same buffers.
        inputs = {"input_ids": "input_ids", "positions": "positions", "features": "hidden_states"}
        seen.append({name: kwargs[key].detach().cpu().clone() for name, key in inputs.items()})
        result = output[0] if isinstance(output, tuple) else output
        seen[0]["output"] = result.detach().cpu().clone()

    hook = module.register_forward_hook(keep, with_kwargs=True)
    once = vllm.SamplingParams(temperature=0.0, max_tokens=1 + REAL_TOKENS, ignore_eos=True)
    engine.generate([{"prompt_token_ids": prompt}], once, use_tqdm=False)
    hook.remove()
    # The first call reads the whole prompt, with features of the target only. Engines pad it.
    save_file = importlib.import_module("safetensors.torch").save_file
    rows = len(prompt)
    save_file({name: tensor[:rows].contiguous() for name, tensor in seen[0].items()}, file)


def _counters(engine: Any) -> Counters:
    metrics = {metric.name: metric for metric in engine.get_metrics()}
    missing = [name for name in NAMES.values() if name not in metrics]
    if missing:
        raise RuntimeError(f"This vLLM does not count {', '.join(missing)}.")
    found = {
        key: metrics[name].values if key == "accepted_per_step" else metrics[name].value
        for key, name in NAMES.items()
    }
    return Counters(**found)


def _tell(stage: str) -> None:
    print(f"{STAGE}{stage}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
