"""What a run says of itself: the first lines, the progress lines, and metrics.jsonl."""

import json
import logging
import resource
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from data.cache import FeatureCache
from data.files import write_json
from data.origin import describe_replies
from data.quantise import Cost
from train.acceptance import HeldoutEstimate
from train.config import TrainConfig
from train.head import DraftHead
from train.plan import Step, chats_of

log = logging.getLogger(__name__)


class Metrics:
    """Collects the figures of a run; lines go to the log, metrics.jsonl and the tracker."""

    def __init__(
        self, out: Path, accelerator: Accelerator, config: TrainConfig, *, start: int, total: int
    ) -> None:
        self.accelerator = accelerator
        self.file = out / "metrics.jsonl"
        self.acceptance: HeldoutEstimate | None = None
        self._start, self._total = start, total
        self._began = time.monotonic()
        self._rows: list[dict] = []
        self._seconds = self._waited = 0.0
        self._supervised = 0
        if accelerator.is_main_process:
            _forget_after(self.file, start)
        if config.tracker:
            accelerator.init_trackers(
                "draft-head",
                config=_flat_config(config),
                init_kwargs={"wandb": {"dir": str(out), "name": out.name}},
            )

    def add(
        self,
        step: Step,
        sums: Tensor,
        *,
        grad_norm: float,
        lr: float,
        began: float,
        waited: float,
    ) -> None:
        """Note one optimizer step. sums: [3] mean smooth-L1, cross-entropy, agreement."""
        smooth_l1, cross_entropy, agreement = sums.tolist()
        seconds = time.perf_counter() - began
        row = {
            "step": step.number,
            "epoch": step.epoch,
            "smooth_l1": smooth_l1,
            "cross_entropy": cross_entropy,
            "agreement": agreement,
            "lr": lr,
            "grad_norm": grad_norm,
            "supervised": step.num_supervised,
            "seconds": seconds,
            "data_wait": waited,
        }
        self._rows.append(row)
        self._write(row)
        self._seconds += seconds
        self._waited += waited
        self._supervised += step.num_supervised

    def add_acceptance(self, step: int, estimate: HeldoutEstimate) -> None:
        """Note a held-out estimate."""
        self.acceptance = estimate
        self._write({"step": step, "heldout": estimate.to_json()})
        if self.accelerator.is_main_process:
            log.info(
                "step %d: held-out acceptance length %s (α %s; sampling %s; %d positions)",
                step,
                estimate,
                _slashed(estimate.counts.rates),
                _slashed(estimate.sampling_rates),
                int(estimate.counts.tried[0]),
            )

    def log_line(self) -> str:
        """Log the means since the last line, and return the short form for the progress bar."""
        rows, last = self._rows, self._rows[-1]

        def mean(name: str) -> float:
            return sum(row[name] for row in rows) / len(rows)

        tokens_per_second = self._supervised / self._seconds
        length = f"{self.acceptance.length:.3f}" if self.acceptance else "-"
        if self.accelerator.is_main_process:
            log.info(
                "step %6d  smooth-l1 %.4f  ce %.4f  agree %.3f  τ %s  lr %.2e  grad %.3f  "
                "%.0f supervised tok/s  data wait %.1f %%  memory %.1f GB  left %s",
                last["step"],
                mean("smooth_l1"),
                mean("cross_entropy"),
                mean("agreement"),
                length,
                last["lr"],
                mean("grad_norm"),
                tokens_per_second,
                100 * self._waited / self._seconds,
                peak_memory() / 1e9,
                self._time_left(last["step"]),
            )
        self._rows = []
        self._seconds = self._waited = 0.0
        self._supervised = 0
        return f"ce {last['cross_entropy']:.2f} τ {length} {tokens_per_second:.0f} tok/s"

    def _time_left(self, step: int) -> timedelta:
        """From the run's own pace so far, estimates and checkpoints included."""
        pace = (time.monotonic() - self._began) / (step - self._start)
        return timedelta(seconds=round(pace * (self._total - step)))

    def _write(self, row: dict) -> None:
        if self.accelerator.is_main_process:
            with self.file.open("a", encoding="utf-8") as f:
                f.write(json.dumps(row) + "\n")
        numbers = {k: v for k, v in row.items() if k != "step" and isinstance(v, int | float)}
        if "heldout" in row:
            numbers = {"acceptance_length": row["heldout"]["acceptance_length"]}
        self.accelerator.log(numbers, step=row["step"])


def refuse_missing_tracker(tracker: str | None) -> None:
    """Raise ValueError that says what to install."""
    if tracker and find_spec(tracker) is None:
        raise ValueError(
            f"tracker={tracker} needs a package that is not installed: "
            f"pip install -e '.[{tracker}]'. Without it metrics.jsonl has the same numbers."
        )


def describe_run(
    config: TrainConfig,
    cache: FeatureCache,
    head: DraftHead,
    training: list[int],
    heldout: list[int],
    total: int,
    start: int,
    accelerator: Accelerator,
) -> None:
    """Print what follows from the settings, and write OUT/run.json. Main process only."""
    pairs = int(cache.num_supervised[training].sum())
    trainable = sum(parameter.numel() for parameter in head.parameters())
    shape = head.config
    log.info(
        "target %s: hidden size %d, vocabulary %d (frozen, not saved)",
        cache.fingerprint["path"],
        shape.hidden_size,
        shape.vocab_size,
    )
    log.info(
        "head: one Llama-shaped layer whatever the target's family, as both engines build it; "
        "%d heads, %d kv heads, head_dim %d, width %d, rope %s: %s trainable parameters",
        shape.num_attention_heads,
        shape.num_key_value_heads,
        shape.head_dim,
        shape.intermediate_size,
        shape.rope_parameters,
        f"{trainable:,}",
    )
    chats, heldout_chats = chats_of(cache, training), chats_of(cache, heldout)
    log.info(
        "data: %d sequences of %d chats to train on with %s supervised pairs, %d of %d held out, "
        "overlap %d",
        len(training),
        len(chats),
        f"{pairs:,}",
        len(heldout),
        len(heldout_chats),
        len(chats & heldout_chats),
    )
    cost = ""
    if cache.calibration is not None:
        cost = f" ({Cost(**cache.calibration.record['costs']['int8'])})"
    log.info("features: %s%s", cache.manifest["feature_dtype"], cost)
    log.info("replies: %s", describe_replies(cache.manifest.get("replies"), cache.fingerprint))
    log.info(
        "run: %d optimizer steps of about %d tokens over %d process(es) on %s%s",
        total,
        config.batch_tokens,
        accelerator.num_processes,
        accelerator.device,
        f", going on after step {start}" if start else "",
    )
    if config.unroll > 1:
        log.info(
            "unroll: each pair is drafted %d steps ahead, from step 2 on the head's own features",
            config.unroll,
        )
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    write_json(
        out / "run.json",
        {
            "settings": asdict(config),
            "replies": cache.manifest.get("replies"),
            "command": [sys.executable, *sys.argv],
            "processes": accelerator.num_processes,
            "git": _git_revision(),
            "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
        },
    )


def _slashed(rates: list[float]) -> str:
    return " / ".join(f"{rate:.3f}" for rate in rates)


def peak_memory() -> int:
    """Bytes: the device's peak on CUDA, else this process's peak resident size."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _forget_after(file: Path, step: int) -> None:
    """Drop the lines of steps that will be done again, or a last line that was cut off."""
    if not file.is_file():
        return
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the process died while it wrote this line
        if row["step"] <= step:
            kept.append(line + "\n")
    file.write_text("".join(kept), encoding="utf-8")


def _flat_config(config: TrainConfig) -> dict:
    return {k: v if isinstance(v, int | float | str) else str(v) for k, v in asdict(config).items()}


def _git_revision() -> str | None:
    """The checkout's revision, or None when this is not one."""
    here = Path(__file__).parent
    result = subprocess.run(
        ["git", "-C", str(here), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return result.stdout.strip() or None if result.returncode == 0 else None
