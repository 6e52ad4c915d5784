"""Dumping: what is refused, what is resumed, and that the result depends on neither."""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.cache.reader import FeatureCache
from data.cache.shards import cut_batches
from data.config import DatasetConfig, TargetConfig
from data.dump.plan import cut_shards
from data.dump.run import dump
from data.files import readable_size
from tests.kill_dump import contents, small_dump
from tests.tiny import save_tiny_target, tiny_chats, tiny_llama_config

ONE_THREAD = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def make_config(target_path, chats_path):
    """A config of a dump in several shards, with changes."""

    def make(out: Path, **changes):
        return small_dump(str(target_path), str(chats_path), out, **changes)

    return make


@pytest.fixture(scope="module")
def finished(make_config, tmp_path_factory) -> Path:
    return dump(make_config(tmp_path_factory.mktemp("finished") / "cache"))


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def launch(*arguments: str, processes: int) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes"]
    command += [str(processes), "--num_machines", "1", "--mixed_precision", "no"]
    command += ["--dynamo_backend", "no", "--main_process_port", "0"]
    command += ["--multi_gpu"] if processes > 1 else []
    command += ["-m", "scripts.dump_features", *arguments]
    return subprocess.run(
        command, env={**os.environ, **ONE_THREAD}, capture_output=True, text=True, timeout=120
    )


def test_two_processes_write_the_same_bytes_as_one(finished, target_path, chats_path, tmp_path):
    out = tmp_path / "cache"
    result = launch(
        f"target={target_path}",
        f"dataset={chats_path}",
        f"out={out}",
        "max_length=256",
        "shard_tokens=1600",
        "batch_tokens=512",
        processes=2,
    )
    assert result.returncode == 0, result.stderr
    assert contents(out) == contents(finished)


def test_a_finished_dump_run_again_does_nothing_and_says_so(make_config, copy, caplog):
    before = {file: file.stat().st_mtime_ns for file in copy.rglob("*") if file.name != ".lock"}
    with caplog.at_level(logging.INFO):
        dump(make_config(copy))
    assert f"{copy} is finished: nothing to do." in caplog.text
    after = {file: file.stat().st_mtime_ns for file in copy.rglob("*") if file.name != ".lock"}
    assert after == before


@pytest.mark.parametrize("damage", ["cut", "flip", "delete", "record"])
def test_a_damaged_shard_of_an_unfinished_dump_is_done_again(damage, make_config, finished, copy):
    (copy / "manifest.json").unlink()
    shard = copy / "shards" / "00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1000] ^= 1
    match damage:
        case "cut":
            shard.write_bytes(content[:-1000])
        case "flip":
            shard.write_bytes(content)
        case "delete":
            shard.unlink()
        case "record":
            shard.with_suffix(".json").write_text('{"file": "shar')
    dump(make_config(copy))
    assert contents(copy) == contents(finished)


def test_a_cut_shard_of_a_finished_cache_is_named_and_done_again(
    make_config, finished, copy, caplog
):
    shard = copy / "shards" / "00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    dump(make_config(copy))
    assert f"damaged in {copy}, done again: shard 2" in caplog.text
    assert contents(copy) == contents(finished)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"max_length": 128}, "max_length: 256 there, 128 now"),
        ({"shard_tokens": 999}, "shard_tokens: 1600 there, 999 now"),
        ({"batch_tokens": 128}, "batch_tokens: 512 there, 128 now"),
    ],
)
def test_changed_settings_are_refused_by_name(changes, line, make_config, copy):
    before = contents(copy)
    with pytest.raises(ValueError, match=rf"made with other settings:\n  {line}\nGive another out"):
        dump(make_config(copy, **changes))
    assert contents(copy) == before


def test_every_changed_setting_is_named(make_config, copy, target_path, chats_path, tmp_path):
    chats = tmp_path / "chats.json"
    chats.write_text(json.dumps(tiny_chats(3)))
    target = Path(shutil.copytree(target_path, tmp_path / "target"))
    template = (target / "chat_template.jinja").read_text()
    (target / "chat_template.jinja").write_text(template.replace("Be brief.", "Be long."))
    changes = {
        "dataset": DatasetConfig(path=str(chats), limit=2),
        "target": TargetConfig(path=str(target), device="cpu", dtype="bfloat16"),
    }
    with pytest.raises(ValueError) as error:
        dump(make_config(copy, **changes))
    fields = [line.split(":")[0].strip() for line in str(error.value).splitlines()[1:-1]]
    assert fields == [
        "dataset.path",
        "dataset.limit",
        "dataset.sha256",
        "target.dtype",
        "chat_template",
    ]


def test_the_same_chats_elsewhere_are_the_same(make_config, copy, chats_path, tmp_path):
    chats = Path(shutil.copy(chats_path, tmp_path / "moved.json"))
    dump(make_config(copy, dataset=DatasetConfig(path=str(chats))))


def test_a_foreign_folder_is_refused_and_left_alone(make_config, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"is not empty and holds no plan.json .*thesis.tex"):
        dump(make_config(tmp_path))
    assert contents(tmp_path) == {"thesis.tex": b"years of work"}


def test_a_dump_that_cannot_fit_is_refused_before_it_starts(make_config, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**9, 10**9 - 17_000_000, 17_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    out = tmp_path / "cache"
    with pytest.raises(
        ValueError, match=r"needs [\d,]+ more bytes .* has 17,000,000 free"
    ) as error:
        dump(make_config(out))
    for option in ("dataset.limit=", "max_length (now 256)", "out=FOLDER on another disk"):
        assert option in str(error.value)
    assert not (out / "plan.json").exists()


def test_the_size_is_known_before_the_dump(finished, make_config, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        out = dump(make_config(tmp_path / "cache", dry_run=True))
    assert not out.exists()
    num_tokens = FeatureCache(finished).manifest["num_tokens"]
    num_bytes = sum(len(content) for content in contents(finished).values())
    assert f"{num_tokens:,} tokens x (32 x bfloat16 + 5) bytes = " in caplog.text
    assert " tokens/s (cpu, torch.float32, batches of 512 tokens) = about 0:0" in caplog.text
    said = float(caplog.text.split("5) bytes = ")[1].split(" kB")[0]) * 1000
    assert num_bytes <= said <= num_bytes + 2048 * 5


def test_nothing_supervised_is_an_error_with_the_reasons(make_config, tmp_path):
    out = tmp_path / "cache"
    with pytest.raises(ValueError, match=r"No supervised token in .*max_length 8") as error:
        dump(make_config(out, max_length=8))
    assert "24  no reply within max_length  (chat0_0, " in str(error.value)
    assert not (out / "plan.json").exists()


def test_a_feature_that_is_not_finite_stops_the_dump_with_the_id(make_config, tmp_path):
    target = save_tiny_target(tmp_path / "target", tiny_llama_config(tie_word_embeddings=False))
    state = load_file(target / "model.safetensors")
    poisoned = TargetConfig(path=str(target), device="cpu")
    config = make_config(tmp_path / "cache", target=poisoned)
    chats = tiny_chats(24)
    chats[17]["conversations"][1]["value"] = "Zzz."
    (tmp_path / "chats.json").write_text(json.dumps(chats))
    config.dataset = DatasetConfig(path=str(tmp_path / "chats.json"))
    token = json.loads((target / "tokenizer.json").read_text())["model"]["vocab"]["z"]
    state["model.embed_tokens.weight"][token] = float("nan")
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ValueError, match=r"not finite in torch.float32: .* 'chat17_0'"):
        dump(config)
    assert not (tmp_path / "cache" / "manifest.json").exists()


def test_sequences_too_long_for_the_target_are_refused(make_config, tmp_path):
    target = save_tiny_target(tmp_path / "target", tiny_llama_config(max_position_embeddings=64))
    changed = TargetConfig(path=str(target), device="cpu")
    with pytest.raises(ValueError, match=r"knows 64 positions .*Set max_length=64 or less"):
        dump(make_config(tmp_path / "cache", target=changed))


def test_shards_hold_the_sequences_in_order():
    assert cut_shards([3, 3, 3, 9, 1, 1], 6) == [[0, 2], [2, 3], [3, 4], [4, 6]]
    assert cut_shards([], 6) == []


def test_batches_hold_every_sequence_once_and_keep_to_the_budget():
    lengths = torch.randint(1, 50, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    batches = cut_batches(lengths, 64)
    assert sorted(index for batch in batches for index in batch) == list(range(100))
    for batch in batches:
        widths = [lengths[index] for index in batch]
        assert max(widths) * len(batch) <= 64
    assert cut_batches([100, 2], 64) == [[0], [1]]


def test_sizes_are_readable():
    sizes = [0, 999, 1000, 134_900_000, 1_200_000_000_000]
    assert [readable_size(n) for n in sizes] == ["0 B", "999 B", "1 kB", "135 MB", "1,200.0 GB"]
