"""Makes SGLang importable on a machine without a GPU, Triton, torchvision and SGLang's kernels.

Call `install` before the first import of SGLang.
"""

import importlib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",  # layers in plain torch instead of CUDA's
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "train.serve.sglang_cpu.classes",
    "TORCHDYNAMO_DISABLE": "1",  # the choice of candidates is a compiled function
    "OMP_NUM_THREADS": "1",  # its steps are too small for more: threads would only spin
}


def install() -> None:
    """Set the environment and put the stand-ins where SGLang's imports find them."""
    os.environ.update(ENVIRONMENT)
    # These look for Triton and torchvision, once; what they find must not be a stand-in.
    for module in ("torch._dynamo", "torch.utils.flop_counter"):
        importlib.import_module(module)
    importlib.import_module("transformers.utils").is_torchvision_available()
    _install_kernels()
    stubs = _sglang_stubs()
    if importlib.util.find_spec("triton") is None:
        _install_triton(stubs)
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_EmptyModules(stubs._MockModule, "torchvision"))


def _install_kernels() -> None:
    from train.serve.sglang_cpu import kernels

    kernels.install_ops()
    sys.modules["sgl_kernel"] = kernels


def _sglang_stubs() -> Any:
    """SGLang's own empty Triton, which it has for Macs.

    Loaded by path: importing it as a part of SGLang already needs Triton.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{sys.executable} has no SGLang.", name="sglang")
    file = Path(spec.submodule_search_locations[0]) / "_platform_stubs.py"
    own = importlib.util.spec_from_file_location("sglang_platform_stubs", file)
    assert own and own.loader
    module = importlib.util.module_from_spec(own)
    sys.modules[own.name] = module  # its dataclasses look their module up
    own.loader.exec_module(module)
    return module


def _install_triton(stubs: Any) -> None:
    sys.meta_path.insert(0, stubs._TritonFinder())
    triton = stubs._make_mock("triton")
    triton.__version__ = "3.0.0"
    triton.cdiv, triton.next_power_of_2 = stubs._cdiv, stubs._next_power_of_2
    triton.Config = stubs._Config
    triton.runtime = stubs._make_mock("triton.runtime")
    triton.language = stubs._make_mock("triton.language")
    triton.language.constexpr = _Constant


class _Constant:
    """triton.language.constexpr: modules make some when they are imported."""

    def __init__(self, value: object = None) -> None:
        self.value = value


class _EmptyModules:
    """Finds a package and everything below it as modules in which every name exists."""

    def __init__(self, make: type[ModuleType], package: str) -> None:
        self._make, self._package = make, package

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] != self._package:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._make(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass
