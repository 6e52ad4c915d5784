"""vLLM as an OpenAI-compatible server, for as long as it is asked: started, asked, stopped."""

import contextlib
import ctypes
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.targets.vllm_environment import vllm_environment
from train.acceptance import ChainCounts
from train.serve.check_differences import differences
from train.serve.check_prompts import PromptSet
from train.serve.engine_vllm import NAMES, Request

log = logging.getLogger(__name__)

OURS = "ours (server)"
START = 600  # seconds until the server must answer
ANSWER = 600  # seconds for one answer
PR_SET_PDEATHSIG = 1


def ask_server(
    request: Request, sets: Sequence[PromptSet], ours: list[list[list[int]]], folder: Path
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Ask the chat endpoint all prompts of all sets, one after the other.

    ours: our answers to each prompt of each set

    Returns the report, whose `prompts_equal` says whether the server made the token ids of the
    dump's template, and the differences of the answers. Raises RuntimeError with the end of the
    log if the server does not start or answer.
    """
    log_file = folder / "server.log"
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += server_arguments(request, port)
    environment = vllm_environment(request.model)
    # A server has its engine in a process of its own.
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING")
    prompts_equal, found = True, []
    address = f"http://127.0.0.1:{port}"
    with serving(command, address, log_file, environment=environment):
        for one, answers in zip(sets, ours, strict=True):
            said_all: list[list[int]] = []
            pairs = list(zip(one.prompts, one.tokens, strict=True))
            for prompt, ids in tqdm(pairs, desc=f"server, {one.name}", unit="prompt"):
                said = _ask(address, request, prompt.messages)
                prompts_equal &= said["prompt_token_ids"] == ids
                said_all.append(said["choices"][0]["token_ids"])
            found += differences(
                one, said_all, answers, compared_with=OURS, num_steps=request.num_steps
            )
        counts = read_counts(_get(f"{address}/metrics"), request.num_steps)
    report = {
        "command": ["vllm", "serve", *command[3:]],
        "prompts": sum(len(one.prompts) for one in sets),
        "prompts_equal": prompts_equal,
        "num_steps": request.num_steps,
        **counts.to_json(),
    }
    return report, found


def server_arguments(request: Request, port: int) -> list[str]:
    speculative = {
        "method": "eagle",
        "model": request.head,
        "num_speculative_tokens": request.num_steps,
    }
    arguments = ["--model", request.model, "--served-model-name", "target"]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--dtype", request.dtype]
    arguments += ["--max-model-len", str(request.max_model_len), "--enforce-eager"]
    arguments += ["--no-enable-prefix-caching", "--speculative-config", json.dumps(speculative)]
    if request.revision:
        arguments += ["--revision", request.revision]
    return arguments + (["--trust-remote-code"] if request.trust_remote_code else [])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def serving(
    command: list[str], address: str, log_file: Path, *, environment: dict[str, str]
) -> Iterator[None]:
    """Run a server until the block ends, however it ends; its output is kept in `log_file`.

    The block begins when ADDRESS/health answers. Raises RuntimeError if it never does.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with log_file.open("wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    try:
        _wait_for(child, f"{address}/health", log_file)
        yield
    finally:
        _stop(child)
        signal.signal(signal.SIGTERM, before)


def _end_with_parent() -> None:
    """Even a parent that is killed leaves no server behind (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_for(child: subprocess.Popen, address: str, log_file: Path) -> None:
    start = told = time.monotonic()
    log.info("server      starting, its log is %s", log_file)
    while time.monotonic() - start < START:
        if child.poll() is not None:
            raise RuntimeError(_death(f"ended with status {child.returncode}", log_file))
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            _get(address, timeout=5)
            log.info("server      answers after %.0f s", time.monotonic() - start)
            return
        if time.monotonic() - told > 15:
            told = time.monotonic()
            log.info("server      %4.0f s  starting", told - start)
        time.sleep(0.5)
    raise RuntimeError(_death(f"did not answer within {START} s", log_file))


def _stop(child: subprocess.Popen) -> None:
    """End the server and all that it started: asked first, then killed."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=20)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # the engine's process, if it is still there


def _death(what: str, log_file: Path) -> str:
    lines = log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-30:]
    return f"The server {what}. The end of {log_file}:\n\n" + "\n".join(f"    {x}" for x in lines)


def _ask(address: str, request: Request, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {
        "model": "target",
        "messages": messages,
        "temperature": 0,
        "max_tokens": request.max_new_tokens,
        "ignore_eos": True,
        "stop_token_ids": request.stop_ids,
        "return_token_ids": True,
    }
    asked = urllib.request.Request(
        f"{address}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(asked, timeout=ANSWER) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"The server refused a prompt: {error.read().decode()[:500]}") from error


def _get(address: str, *, timeout: float = 30) -> str:
    with urllib.request.urlopen(address, timeout=timeout) as answer:
        return answer.read().decode()


def read_counts(metrics: str, num_steps: int) -> ChainCounts:
    """The counters of speculation in Prometheus' text form."""

    def value(name: str, label: str = "") -> int:
        found = re.search(
            rf"^{re.escape(name)}_total\{{[^}}]*{label}[^}}]*\}} (\S+)$", metrics, re.M
        )
        return int(float(found[1])) if found else 0

    per_step = [value(NAMES["accepted_per_step"], f'position="{n}"') for n in range(num_steps)]
    return ChainCounts.of_totals(value(NAMES["drafts"]), per_step)
