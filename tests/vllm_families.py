"""vLLM with many small targets, one after the other, for the price of one import.

    python -m tests.vllm_families FOLDER ...

Each FOLDER has a request.json (train/serve/engine_vllm.py); it gets result.json and parity, or
error.txt with the end of what vLLM said. vLLM does not start twice in one process: each target has
a fork of this one.
"""

import importlib
import os
import sys
import traceback
from pathlib import Path

from train.serve.engine_vllm import main


def run(folder: Path) -> None:
    """In the fork: everything it says goes into FOLDER/log."""
    with (folder / "log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            main(folder / "request.json", folder / "result.json")
        except BaseException:
            (folder / "error.txt").write_text(traceback.format_exc())
            os._exit(1)
        os._exit(0)


if __name__ == "__main__":
    importlib.import_module("vllm")
    for name in sys.argv[1:]:
        if (child := os.fork()) == 0:
            run(Path(name))
        os.waitpid(child, 0)
        print(name, "error" if (Path(name) / "error.txt").exists() else "ok", flush=True)
