"""The README's commands are the commands: every one composes, and the stages run as printed."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)


def commands(*languages: str) -> list[list[str]]:
    """Script name and arguments of each command in the fenced blocks of these languages."""
    lines = [
        line for language, text in BLOCKS if language in languages for line in text.split("\n")
    ]
    found = [
        shlex.split(line) for line in lines if re.match(r"(python|accelerate) .*-m scripts", line)
    ]
    module = [
        next(i for i, word in enumerate(words) if word.startswith("scripts.")) for words in found
    ]
    return [words[at:] for words, at in zip(found, module, strict=True)]


def run(script: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", script, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("words", commands("bash", ""), ids=" ".join)
def test_every_command_of_the_readme_composes(words):
    script, *arguments = words
    if "--multirun" in arguments:  # one job of the sweep
        arguments = [a.split(",")[0] for a in arguments if a != "--multirun"]
    run(script, *arguments, "--cfg", "job")


def test_the_stages_run_as_printed_on_a_tiny_target(tmp_path, target_path, chats_path):
    """Each stage command of the README, with the demo's paths replaced by a tiny target's."""
    run_folder = tmp_path / "demo"
    places = {
        "scripts.dump_features": [
            f"target={target_path}",
            f"dataset={chats_path}",
            f"out={run_folder}/features",
        ],
        "scripts.train_head": [
            f"features={run_folder}/features",
            f"out={run_folder}",
            "heldout.share=0.3",
        ],
        "scripts.export_head": [f"checkpoint={run_folder}"],
        "scripts.heldout_prompts": [
            f"dataset={chats_path}",
            f"out={run_folder}/prompts.jsonl",
            "share=0.3",
        ],
        "scripts.evaluate_head": [
            f"head={run_folder}/export/vllm",
            f"target={target_path}",
            f"prompts={run_folder}/prompts.jsonl",
            "max_new_tokens=8",
        ],
    }
    # The index and a serving engine have tests of their own.
    elsewhere = {"scripts.fetch_demo", "scripts.check_export"}
    stages = [words for words in commands("bash") if words[0] not in elsewhere]
    assert {words[0] for words in stages} == set(places)

    printed = "".join(run(*words, *places[words[0]]) for words in stages)

    assert "answers equal plain decoding token for token" in printed
    assert "vllm serve" in printed
    for file in (
        "features/manifest.json",
        "metrics.jsonl",
        "best.json",
        "export/vllm/model.safetensors",
        "export/sglang/model.safetensors",
        "export/vllm/evaluation/report.html",
    ):
        assert (run_folder / file).is_file(), file
