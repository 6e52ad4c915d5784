import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from conf import expand

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(f.stem for f in (ROOT / "scripts").glob("*.py") if f.stem != "__init__")
RECIPES = sorted((ROOT / "conf" / "recipe").glob("*.yaml"))


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_the_command_does_and_how_to_call_it(script):
    result = run(f"scripts.{script}", "--help")
    assert result.returncode == 0, result.stderr
    assert f"python -m scripts.{script}" in result.stdout
    assert "???" in result.stdout or script == "fetch_demo"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda f: f.stem)
def test_every_recipe_composes_for_every_script_that_it_names(recipe):
    for script in yaml.safe_load(recipe.read_text()):
        result = run(f"scripts.{script}", f"recipe={recipe.stem}", "--cfg", "job")
        assert result.returncode == 0, result.stdout + result.stderr


def test_what_the_user_says_wins_over_the_recipe():
    arguments = expand("train_head", ["recipe=quickstart", "lr=7.0", "head.init=random"])
    assert [a for a in arguments if a.startswith("lr=")] == ["lr=7.0"]
    assert [a for a in arguments if a.startswith("head.init=")] == ["head.init=random"]
    assert "features=checkpoints/demo/features" in arguments


def test_a_sweep_may_start_from_a_recipe(tmp_path):
    """The recipe's values once stood before the flag, where argparse refused the rest."""
    arguments = ["recipe=ablation", "head.inputs=token", f"features={tmp_path / 'nix'}"]
    result = run("scripts.train_head", "--multirun", *arguments, f"out={tmp_path / 'out'}")
    assert "nix" in result.stderr and "unrecognized" not in result.stderr


def test_a_path_is_taken_for_target_and_dataset_unless_a_file_has_that_name():
    arguments = expand("dump_features", ["target=org/name", "dataset=a/b.json"])
    assert arguments == ["target.path=org/name", "dataset.path=a/b.json"]
    assert expand("dump_features", ["target=demo"]) == ["target=demo"]


def test_an_unknown_recipe_names_those_there_are():
    with pytest.raises(SystemExit, match=r"no recipe 'nix'.*paper, quickstart"):
        expand("train_head", ["recipe=nix"])


def test_a_wrong_value_is_one_message_without_traceback():
    result = run("scripts.train_head", "features=a", "out=b", "noise=loud")
    assert result.returncode == 1
    assert "noise is 'loud', expected one of paper, reference, none" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_cache_names_the_command_that_makes_it(tmp_path):
    result = run("scripts.train_head", f"features={tmp_path / 'nix'}", f"out={tmp_path / 'run'}")
    assert result.returncode == 1
    assert "python -m scripts.dump_features" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_setting_is_named(tmp_path):
    result = run("scripts.train_head", f"out={tmp_path}")
    assert result.returncode == 1
    assert "features" in result.stderr and "Traceback" not in result.stderr
