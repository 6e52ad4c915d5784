"""The configuration of every stage: yaml beside this file, checked against dataclasses.

`prepare` runs before Hydra. It registers the dataclass of the script and turns the two shorthands
of our command line into ordinary overrides, so that what is below it is plain Hydra:

    recipe=NAME       -> every value of the script's section in conf/recipe/NAME.yaml
    target=PATH       -> target.path=PATH    unless conf/target/PATH.yaml exists; dataset= likewise,
                         where the script's config has a target or data set of its own to describe
"""

import functools
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

log = logging.getLogger(__name__)
CONF = Path(__file__).parent
PACKAGES = ("conf", "data", "scripts", "train")
INTERRUPTED = 130  # exit status, as shells have it for Ctrl-C
HYDRA = {"version_base": "1.3", "config_path": "pkg://conf"}


def prepare(script: str, schema: type) -> None:
    """Register `schema` as the type of `script`'s config, and expand the shorthands in sys.argv."""
    ConfigStore.instance().store(name=f"{script}_schema", node=schema)
    groups = {field.name for field in fields(schema) if is_dataclass(field.type)}
    sys.argv[1:] = expand(script, sys.argv[1:], groups=groups)


def task(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Run a script's main with our log on the terminal, and its user errors as plain messages.

    An error that our own code raised says what to do; a traceback would only hide it. Any other
    error keeps its traceback, as all do under HYDRA_FULL_ERROR=1. Ctrl-C needs no traceback either.
    """

    @functools.wraps(function)
    def wrapped(cfg: Any) -> Any:
        start_log()
        if missing := sorted(OmegaConf.missing_keys(cfg)):
            example = missing[0].removesuffix(".path")
            sys.exit(
                f"error: {', '.join(missing)} must be given, as {example}=...; --help shows all "
                "settings, and recipe=NAME sets those of a whole run."
            )
        try:
            return function(cfg)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            if os.environ.get("HYDRA_FULL_ERROR") == "1" or not _is_ours(error):
                raise
            sys.exit(f"error: {error}")

    return wrapped


def start_log() -> None:
    """Our packages' log goes to the terminal, from the main process only."""
    logging.basicConfig(format="%(message)s", stream=sys.stdout, level=logging.WARNING)
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR
    for package in (*PACKAGES, "__main__"):
        logging.getLogger(package).setLevel(level)


def is_sweep() -> bool:
    """Whether this is one job of a --multirun."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


def job_folder(out: str) -> str:
    """`out`, or a folder below it for each job of a --multirun, which is told apart in the log."""
    if not is_sweep():
        return out
    hydra = HydraConfig.get()
    log.info("\njob %d: %s", hydra.job.num, " ".join(hydra.overrides.task))
    return f"{out}/{hydra.job.num:03d}"


def expand(
    script: str, arguments: list[str], *, groups: Collection[str] = ("target", "dataset")
) -> list[str]:
    """Replace `recipe=`, `target=PATH` and `dataset=PATH` by plain overrides.

    What the user wrote wins over the recipe. Raises SystemExit naming the recipes there are.
    """
    recipes = [a.partition("=")[2] for a in arguments if a.startswith("recipe=")]
    rest = [_as_path(a, groups) for a in arguments if not a.startswith("recipe=")]
    said = {a.partition("=")[0].lstrip("+~") for a in rest}
    values = [v for name in recipes for v in _recipe(script, name, groups)]
    expanded = [v for v in values if v.partition("=")[0] not in said] + rest
    # argparse does not take overrides on both sides of this flag, which is where people write it.
    return sorted(expanded, key=lambda a: a not in ("--multirun", "-m"))


def _is_ours(error: BaseException) -> bool:
    """Whether the error was raised in this project's own code."""
    traceback, file = error.__traceback__, ""
    while traceback:
        file, traceback = traceback.tb_frame.f_code.co_filename, traceback.tb_next
    return any(Path(file).is_relative_to(CONF.parent / package) for package in PACKAGES)


def _recipe(script: str, name: str, groups: Collection[str]) -> Iterator[str]:
    file = CONF / "recipe" / f"{name}.yaml"
    if not file.is_file():
        known = ", ".join(sorted(f.stem for f in file.parent.glob("*.yaml")))
        sys.exit(f"There is no recipe {name!r}. There are: {known} (files in {file.parent}).")
    sections = yaml.safe_load(file.read_text(encoding="utf-8"))
    for key, value in _flatten(sections.get(script) or {}):
        yield _as_path(f"{key}={_render(value)}", groups)


def _flatten(section: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _render(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):
        return "[" + ",".join(_render(item) for item in value) + "]"
    return str(value)


def _as_path(argument: str, groups: Collection[str]) -> str:
    key, sign, value = argument.partition("=")
    is_group = (CONF / key).is_dir() and key in groups
    if not sign or not is_group or (CONF / key / f"{value}.yaml").is_file():
        return argument
    return f"{key}.path={value}"
