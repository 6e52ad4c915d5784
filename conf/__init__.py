"""The configuration of every stage: yaml beside this file, checked against dataclasses.

`prepare` runs before Hydra. It registers the dataclass of the script and turns the two shorthands
of our command line into ordinary overrides, so that what is below it is plain Hydra:

    recipe=NAME       -> every value of the script's section in conf/recipe/NAME.yaml
    target=PATH       -> target.path=PATH    unless conf/target/PATH.yaml exists; dataset= likewise
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import yaml
from hydra.core.config_store import ConfigStore

CONF = Path(__file__).parent
HYDRA = {"version_base": "1.3", "config_path": "pkg://conf"}


def prepare(script: str, schema: type) -> None:
    """Register `schema` as the type of `script`'s config, and expand the shorthands in sys.argv."""
    ConfigStore.instance().store(name=f"{script}_schema", node=schema)
    sys.argv[1:] = expand(script, sys.argv[1:])


def expand(script: str, arguments: list[str]) -> list[str]:
    """Replace `recipe=`, `target=PATH` and `dataset=PATH` by plain overrides.

    What the user wrote wins over the recipe. Raises SystemExit naming the recipes there are.
    """
    recipes = [a.partition("=")[2] for a in arguments if a.startswith("recipe=")]
    rest = [_as_path(a) for a in arguments if not a.startswith("recipe=")]
    said = {a.partition("=")[0].lstrip("+~") for a in rest}
    values = [v for name in recipes for v in _recipe(script, name)]
    return [v for v in values if v.partition("=")[0] not in said] + rest


def _recipe(script: str, name: str) -> Iterator[str]:
    file = CONF / "recipe" / f"{name}.yaml"
    if not file.is_file():
        known = ", ".join(sorted(f.stem for f in file.parent.glob("*.yaml")))
        sys.exit(f"There is no recipe {name!r}. There are: {known} (files in {file.parent}).")
    sections = yaml.safe_load(file.read_text(encoding="utf-8"))
    for key, value in _flatten(sections.get(script) or {}):
        yield _as_path(f"{key}={_render(value)}")


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


def _as_path(argument: str) -> str:
    key, sign, value = argument.partition("=")
    is_group = (CONF / key).is_dir() and key in ("target", "dataset")
    if not sign or not is_group or (CONF / key / f"{value}.yaml").is_file():
        return argument
    return f"{key}.path={value}"
