"""The figures of a run: progress lines, metrics.jsonl and a tracker."""

import json
import logging
import time
from dataclasses import asdict
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from data.files import atomic_write, writing
from data.memory import peak_resident
from train.acceptance import HeldoutEstimate
from train.config import TrainConfig, flat
from train.fit.plan import Step

log = logging.getLogger(__name__)


class Metrics:
    """Collects the figures of a run; lines go to the log, metrics.jsonl and the tracker."""

    def __init__(
        self, accelerator: Accelerator, config: TrainConfig, *, run_id: str, start: int, total: int
    ) -> None:
        """Goes on after step `start`. run_id: what a tracker knows the run by"""
        self.accelerator = accelerator
        self.file = Path(config.out) / "metrics.jsonl"
        self.acceptance: HeldoutEstimate | None = None
        self._start, self._total = start, total
        self._began = time.monotonic()
        self._rows: list[dict] = []
        self._seconds = self._waited = 0.0
        self._supervised = 0
        self._elapsed_before = 0.0
        if accelerator.is_main_process:
            self._elapsed_before = _forget_after(self.file, start)
        if config.tracker:
            _start_tracker(accelerator, config, run_id=run_id, start=start)

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

    def add_acceptance(self, step: int, estimate: HeldoutEstimate, *, best: float) -> None:
        """Note a held-out estimate. best: the highest acceptance length, this one included"""
        self.acceptance = estimate
        self._write({"step": step, "heldout": estimate.to_json(), "best_acceptance_length": best})
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
        row["elapsed"] = self._elapsed_before + time.monotonic() - self._began
        if self.accelerator.is_main_process:
            with writing(self.file), self.file.open("a", encoding="utf-8") as f:
                f.write(json.dumps(row) + "\n")
        numbers = {k: v for k, v in row.items() if k != "step" and isinstance(v, int | float)}
        if "heldout" in row:
            numbers["acceptance_length"] = row["heldout"]["acceptance_length"]
        self.accelerator.log(numbers, step=row["step"])


def refuse_missing_tracker(tracker: str | None) -> None:
    """Raise ValueError that says what to install."""
    if tracker and find_spec(tracker) is None:
        raise ValueError(
            f"tracker={tracker} needs a package that is not installed: "
            f"pip install -e '.[{tracker}]'. Without it metrics.jsonl has the same numbers."
        )


def _slashed(rates: list[float]) -> str:
    return " / ".join(f"{rate:.3f}" for rate in rates)


def peak_memory() -> int:
    """Bytes: the device's peak on CUDA, else this process's peak resident size."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return peak_resident()


def _start_tracker(
    accelerator: Accelerator, config: TrainConfig, *, run_id: str, start: int
) -> None:
    """Start wandb or TensorBoard in the run's folder, or go on with what it has of this run."""
    out = Path(config.out)
    settings = {
        name: value if isinstance(value, int | float | str) else str(value)
        for name, value in flat(asdict(config)).items()
    }
    going_on = start and config.tracker == "tensorboard"  # it would show the settings once more
    accelerator.init_trackers(
        "draft-head",
        config=None if going_on else settings,
        init_kwargs={
            "wandb": {"dir": str(out), "name": out.name, "id": run_id, "resume": "allow"},
            "tensorboard": {"purge_step": start + 1} if start else {},
        },
    )


def _forget_after(file: Path, step: int) -> float:
    """Drop the lines of steps that will be done again, or a last line that was cut off.

    Returns the seconds that the run had taken up to the last line that stays.
    """
    if not file.is_file():
        return 0.0
    kept, elapsed = [], 0.0
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the process died while it wrote this line
        if row["step"] <= step:
            kept.append(line + "\n")
            elapsed = row["elapsed"]
    with writing(file), atomic_write(file) as tmp:
        tmp.write_text("".join(kept), encoding="utf-8")
    return elapsed
