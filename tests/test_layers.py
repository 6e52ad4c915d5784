"""Imports point one way: scripts -> conf -> train -> data."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ["data", "train", "conf", "scripts"]  # each may import those before it


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(file: Path) -> set[str]:
    """Top-level packages that a file imports, at its head or inside functions."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", LAYERS)
def test_no_layer_imports_one_above_it(package):
    above = set(LAYERS[LAYERS.index(package) + 1 :])
    wrong = {str(f.relative_to(ROOT)): imported(f) & above for f in modules(package)}
    assert modules(package) and not {f: names for f, names in wrong.items() if names}


@pytest.mark.parametrize("package", ["data", "train"])
def test_only_entry_points_know_hydra(package):
    assert not [f for f in modules(package) if "hydra" in imported(f)]


@pytest.mark.parametrize("name", ["data/config.py", "train/config.py", "conf/__init__.py"])
def test_configs_do_not_load_torch(name):
    """`--help` answers in a second because of it."""
    assert not imported(ROOT / name) & {"torch", "transformers", "accelerate", "datasets"}


@pytest.mark.parametrize("script", modules("scripts"), ids=lambda f: f.stem)
def test_scripts_load_nothing_heavy_before_the_config_is_known(script):
    """`train_head --help` once took three seconds, for one import at its head."""
    for node in ast.parse(script.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            package, _, module = (node.module or "").partition(".")
            assert package not in ("data", "train") or module == "config", node.module
            assert package not in ("torch", "transformers", "accelerate")


def test_every_script_has_a_config_of_its_name():
    for script in modules("scripts"):
        if "hydra" in imported(script):
            assert (ROOT / "conf" / f"{script.stem}.yaml").is_file(), script
