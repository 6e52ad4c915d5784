"""Exported heads in SGLang's own loader, by a child process in SGLang's own Python.

SGLang's pins contradict those of this project and of vLLM, so it has an environment of its own,
made by `. scripts/setup.sh && setup_sglang`. On a CPU it runs over the stand-ins of
`train/serve/sglang_cpu`, whose docstring says what is not real there. Importing this module imports
no SGLang.
"""

import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from data.config import TargetConfig
from data.files import read_json, write_json
from data.lock import locked
from data.targets.checkpoint_files import locate
from data.targets.families import load_config, target_dtype
from train.decode import Drafting
from train.head import DraftHead, draft_config

log = logging.getLogger(__name__)

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
INSTALL = "cd {root} && . scripts/setup.sh && setup_sglang"
ROPE_POSITIONS = 1024  # of the table that SGLang's is compared with
SECONDS = 600  # after which a child is taken for stuck


def find_python(python: str | None = None) -> Path:
    """The interpreter that has SGLang: `python`, or that of .venv-sglang.

    Raises RuntimeError with the command that makes it.
    """
    path = Path(python).expanduser() if python else PYTHON
    if not path.is_file():
        raise RuntimeError(
            f"There is no SGLang: {path} does not exist. It has an environment of its own (2 GB):\n"
            f"\n    {INSTALL.format(root=ROOT)}\n\n"
            "or name the Python of another one (sglang_python=PATH)."
        )
    return path


def check_with_sglang(
    folder: Path, target: TargetConfig, *, out: Path, python: str | None = None
) -> dict[str, Any]:
    """What SGLang's loader makes of one head: see `check_many`."""
    return check_many([folder], target, out=out, python=python)[0]


def check_many(
    folders: Sequence[Path], target: TargetConfig, *, out: Path, python: str | None = None
) -> list[dict[str, Any]]:
    """Let SGLang load heads of one target, and hold its modules against the files.

    out: request, result and log of the child are kept here, as sglang.*

    returns for each folder a report: `passed`, `problems` (texts), `parameters` (of each of
    SGLang's parameters its shape, the file's tensors in it, and whether it is equal to them bit
    for bit), `version`, `seconds`

    Raises RuntimeError if there is no SGLang, or with the end of the log if it dies.
    """
    interpreter = find_python(python)
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    expected = draft_config(load_config(target))
    request = {
        **place_of(target),
        "folders": [str(folder.resolve()) for folder in folders],
        "rope": str(_save_rope(DraftHead(expected), out / "sglang.rope.safetensors")),
        "epsilon": expected.rms_norm_eps,
    }
    result = run_child("train.serve.sglang_cpu.load", request, out=out, python=interpreter)
    seconds = time.monotonic() - began
    return [
        {
            "engine": "sglang",
            "version": result["version"],
            "passed": not head["problems"],
            "seconds": seconds,
            **head,
        }
        for head in result["heads"]
    ]


def decode_with_sglang(
    folder: Path | None,
    target: TargetConfig,
    prompts: Sequence[Sequence[int]],
    *,
    drafting: Drafting,
    max_new_tokens: int,
    stop_ids: Collection[int],
    out: Path,
    batch_size: int = 1,
    token_map: Path | None = None,
    tensors: Path | None = None,
    python: str | None = None,
) -> dict[str, Any]:
    """Answer prompts greedily with SGLang's scheduler and EAGLE worker, over the stand-ins.

    folder:    the exported head; None: plain decoding
    prompts:   token ids
    drafting:  a chain, or a dynamic tree
    token_map: the file of `scripts.build_token_map`
    tensors:   a file for all that enters and leaves the draft model; for a few short prompts

    returns `version`, `seconds` of decoding, and `answers`; each of them has `tokens`, the stop
    token included; `accepted`, the draft tokens accepted in each round, before the answer is cut
    (the first token comes from the prefill and is no round); and `rounds`, of each round the
    `tokens` and `parents` of the tree's nodes, the root first, and the `path` of accepted nodes

    Raises RuntimeError if there is no SGLang, or with the end of the log if it dies.
    """
    interpreter = find_python(python)
    out.mkdir(parents=True, exist_ok=True)
    # A round drafts behind the sequence, each rank in slots of its own, and rounds are prepared in
    # advance.
    room = 2 * (drafting.topk * drafting.num_steps + drafting.num_draft_tokens)
    request = {
        **place_of(target),
        "head": str(folder.resolve()) if folder else None,
        "num_steps": drafting.num_steps,
        "topk": drafting.topk,
        "num_draft_tokens": drafting.num_draft_tokens,
        "prompts": [list(ids) for ids in prompts],
        "max_new_tokens": max_new_tokens,
        "stop_ids": sorted(stop_ids),
        "context_length": max(map(len, prompts)) + max_new_tokens + room,
        "batch_size": batch_size,
        "token_map": str(token_map.resolve()) if token_map else None,
        "tensors": str(tensors.resolve()) if tensors else None,
    }
    return run_child("train.serve.sglang_cpu.decode", request, out=out, python=interpreter)


def place_of(target: TargetConfig) -> dict[str, Any]:
    """How a server of this target would be told where it is.

    A float32 target is served in float16 unless SGLang is told not to; a check wants it exact.
    """
    location = locate(target)
    is_float32 = target_dtype(target, load_config(target)) == torch.float32
    path = Path(location.path)
    if location.gguf_file:
        path = path / location.gguf_file
    return {
        "target": str(path.resolve()) if path.exists() else location.path,
        "revision": location.revision,
        "trust_remote_code": target.trust_remote_code,
        "dtype": "float32" if is_float32 else target.dtype,
    }


def run_child(
    module: str, request: dict[str, Any], *, out: Path, python: Path, seconds: int = SECONDS
) -> Any:
    """Run `python -m MODULE REQUEST RESULT` in SGLang's Python; returns what RESULT holds.

    Raises RuntimeError with the end of the log if it fails or takes longer than `seconds`.
    """
    busy = f"Another check is writing into {out}. Wait for it, or give another out=FOLDER."
    with locked(out / ".lock", busy=busy):
        return _run_child(module, request, out=out, python=python, seconds=seconds)


def _run_child(
    module: str, request: dict[str, Any], *, out: Path, python: Path, seconds: int
) -> Any:
    files = {kind: (out / f"sglang.{kind}").resolve() for kind in ("request.json", "result.json")}
    files["log"] = (out / "sglang.log").resolve()
    files["result.json"].unlink(missing_ok=True)
    write_json(files["request.json"], request)
    command = [str(python), "-m", module, str(files["request.json"]), str(files["result.json"])]
    log.info("SGLang      %s", files["log"])
    with files["log"].open("wb") as output:
        status: int | str = f"no end after {seconds} s"
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = subprocess.run(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(),
                timeout=seconds,
                check=False,
            ).returncode
    if status != 0 or not files["result.json"].is_file():
        raise RuntimeError(_death(status, files["log"], python))
    return read_json(files["result.json"], made_by="python -m scripts.check_export engine=sglang")


def describe(report: dict[str, Any]) -> str:
    """A report of `check_many` for a terminal."""
    equal = [name for name, found in report["parameters"].items() if found["equal"]]
    verdict = "loads what was exported" if report["passed"] else "does NOT load what was exported"
    lines = [f"SGLang {report['version']} {verdict}: {report['folder']}"]
    for name, found in report["parameters"].items():
        mark = "equal bit for bit" if found["equal"] else "DIFFERENT"
        lines.append(f"  {mark:<18}{name:<48}{found['shape']}")
    if report["parameters"]:
        lines.append(f"  {len(equal)} of {len(report['parameters'])} parameters are the file's")
    lines += [f"  problem: {problem}" for problem in report["problems"]]
    return "\n".join(lines)


def _save_rope(head: DraftHead, file: Path) -> Path:
    positions = torch.arange(ROPE_POSITIONS)[None]
    cos, sin = head.rotary(torch.zeros(1), positions)  # [1, P, d], both halves alike
    half = cos.shape[-1] // 2
    tables = {"cos": cos[0, :, :half], "sin": sin[0, :, :half]}
    save_file({name: table.contiguous() for name, table in tables.items()}, file)
    return file.resolve()


def _environment() -> dict[str, str]:
    """Ours without what points Python at this project's packages, which are not SGLang's."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "PYTHONPATH")}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def _death(status: int | str, file: Path, python: Path) -> str:
    text = file.read_text(encoding="utf-8", errors="replace")
    how = f"exit status {status}" if isinstance(status, int) else status
    if "has no SGLang" in text:
        return f"{python} has no SGLang. Make an environment for it: {INSTALL.format(root=ROOT)}"
    end = "\n".join(f"    {line}" for line in text.splitlines()[-30:])
    return f"SGLang ended with {how}. The end of {file}:\n\n{end}"
