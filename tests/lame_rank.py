"""A training in which process 1 dies or hangs at its third step. Run by tests/test_launch.py.

accelerate launch ... -m tests.lame_rank dies|hangs CACHE RUN
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

from data.batches import PackedBatch
from data.processes import leave_launch
from tests.training import small_run
from train.fit import launch, loop
from train.fit.plan import Step
from train.fit.setup import Run


def main(what: str, cache: str, run: str) -> None:
    whole = loop.load

    def load(state: Run, step: Step) -> list[PackedBatch]:
        if step.number == 3 and state.accelerator.process_index == 1:
            if what == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        return whole(state, step)

    loop.load = load
    launch.TIMEOUT = timedelta(seconds=15)
    loop.fit(small_run(Path(cache), Path(run)))
    leave_launch()


if __name__ == "__main__":
    main(*sys.argv[1:])
