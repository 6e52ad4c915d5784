"""Large CPU tensors without the price of fresh memory pages, and how much memory was held."""

import ctypes
import re
import resource
import sys
from pathlib import Path

import torch

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # malloc.h
GIBIBYTE = 2**30


def keep_freed_pages(device: torch.device) -> None:
    """Have glibc keep freed memory for the next tensor instead of giving it back to the kernel.

    By default each large tensor is mapped and unmapped anew, and the kernel clears its pages one by
    one: on some machines that takes several times as long as the arithmetic on them. No effect
    outside glibc, and none is wanted on an accelerator, which has its own allocator.
    """
    if device.type != "cpu" or not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library (musl)
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, 2 * GIBIBYTE - 1)
    mallopt(M_TOP_PAD, GIBIBYTE)


def peak_resident() -> int:
    """Bytes: the most memory that this process has held."""
    status = Path("/proc/self/status")
    # ru_maxrss begins with what the process that started this one held.
    if status.is_file() and (found := re.search(r"VmHWM:\s*(\d+) kB", status.read_text("ascii"))):
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
