"""A cache that is inspected tells every damage, and one that is repaired has none left."""

import errno
import json
import os
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.cache.inspect import inspect, report, text
from data.cache.reader import FeatureCache
from data.config import InspectConfig, TargetConfig
from data.dump.run import dump
from data.files import json_bytes, read_json, sha256
from tests.kill_dump import contents, small_dump
from tests.tiny import save_tiny_target, tiny_llama_config

DAMAGES = ("cut", "flipped", "deleted", "replaced", "longer")
FEATURE_DTYPES = ("auto", "int8")


@pytest.fixture(scope="module")
def finished(target_path, chats_path, tmp_path_factory) -> dict[str, Path]:
    """A cache in three shards, for each way of storing features."""
    folder = tmp_path_factory.mktemp("finished")
    return {
        dtype: dump(
            small_dump(str(target_path), str(chats_path), folder / dtype, feature_dtype=dtype)
        )
        for dtype in FEATURE_DTYPES
    }


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished["auto"], tmp_path / "copy"))


def look(cache: Path, **settings):
    return inspect(InspectConfig(cache=str(cache), **settings))


def damage(file: Path, kind: str) -> None:
    content = bytearray(file.read_bytes())
    match kind:
        case "cut":
            file.write_bytes(content[: len(content) * 2 // 3])
        case "flipped":
            content[len(content) * 2 // 3] ^= 4
            file.write_bytes(content)
        case "deleted":
            file.unlink()
        case "replaced":
            cache = file.parent.parent if file.parent.name == "shards" else file.parent
            shutil.copy(max(f for f in cache.rglob(f"*{file.suffix}") if f != file), file)
        case "longer":
            file.write_bytes(content + b"\n\0")


def files_of(cache: Path) -> list[str]:
    return [name for name in contents(cache) if name not in (".lock", "plan.json")]


@pytest.mark.parametrize("dtype", FEATURE_DTYPES)
def test_a_whole_cache_has_no_problem_and_its_figures_are_those_of_its_features(dtype, finished):
    found = look(finished[dtype])
    assert found.is_whole and not found.strangers
    cache = FeatureCache(finished[dtype])
    features = torch.cat([cache.sequence(i).features for i in range(len(cache))]).double()
    figures = report(found)
    assert figures["num_tokens"] == len(features) == cache.manifest["num_tokens"]
    squares = sum(part["rms"] ** 2 * part["num_tokens"] for part in figures["features"])
    assert (squares / len(features)) ** 0.5 == pytest.approx(features.square().mean().sqrt())
    assert max(p["largest"] for p in figures["features"]) == pytest.approx(features.abs().max())
    rms = features.square().mean(0).sqrt()
    assert [c["channel"] for c in figures["loudest_channels"]] == rms.topk(5).indices.tolist()
    assert figures["loudest_channels"][0]["rms"] == pytest.approx(rms.max())


@pytest.mark.parametrize("dtype", FEATURE_DTYPES)
def test_every_damage_to_every_file_is_found_and_repaired_to_the_same_bytes(
    dtype, finished, tmp_path
):
    expected = contents(finished[dtype])
    names = files_of(finished[dtype])
    assert len(names) == (8 if dtype == "auto" else 10)
    for number, (name, kind) in enumerate((n, k) for n in names for k in DAMAGES):
        copy = Path(shutil.copytree(finished[dtype], tmp_path / str(number)))
        damage(copy / name, kind)
        if name == "manifest.json" and kind == "deleted":
            assert not look(copy).is_finished
        else:
            [problem] = look(copy).problems
            # Where an int8 shard's record and the manifest differ in a statistic, either is wrong.
            unsure = problem.found == "not what the manifest says" and dtype == "int8"
            assert problem.file == name or (unsure and name == "manifest.json"), (name, kind)
        assert look(copy, repair=True).is_whole, (name, kind)
        assert contents(copy) == expected, (name, kind)
        shutil.rmtree(copy)


def test_two_damages_at_once_are_repaired_unless_a_token_is_nowhere(finished, tmp_path):
    expected = contents(finished["auto"])
    nowhere = 0
    for one, other in combinations(files_of(finished["auto"]), 2):
        for kind in ("deleted", "flipped") if "tokens" in one + other else ("deleted",):
            copy = Path(shutil.copytree(finished["auto"], tmp_path / "copy"))
            damage(copy / one, kind)
            damage(copy / other, kind)
            if kind == "deleted" and {one, other} in [
                {"tokens.safetensors", f"shards/0000{i}.safetensors"} for i in range(3)
            ]:
                nowhere += 1
                with pytest.raises(RuntimeError, match=r"both damaged .* out=ANOTHER_FOLDER"):
                    look(copy, repair=True)
            else:
                assert look(copy, repair=True).is_whole, (one, other, kind)
                assert contents(copy) == expected, (one, other, kind)
            shutil.rmtree(copy)
    assert nowhere == 3


@pytest.mark.parametrize("kind", [kind for kind in DAMAGES if kind != "deleted"])
def test_a_damaged_plan_cannot_be_repaired_and_the_message_says_the_way_out(kind, finished, copy):
    damage(copy / "plan.json", kind)
    with pytest.raises(ValueError, match=r"plan.json (is damaged|has format_version)") as error:
        look(copy, repair=True)
    if kind != "replaced":
        assert "writes the same plan.json and tokens.safetensors" in str(error.value)
    shutil.copy(finished["auto"] / "plan.json", copy)
    assert look(copy).is_whole


def test_a_change_of_any_value_in_the_plan_is_noticed(copy):
    plan = read_json(copy / "plan.json", made_by="")
    plan["sequence_ids"][3] += "x"
    (copy / "plan.json").write_bytes(json_bytes(plan))
    with pytest.raises(ValueError, match=r"plan.json is damaged: its checksum is another"):
        look(copy)


def sign(cache: Path, index: int, **tensors: torch.Tensor) -> None:
    """Change tensors of a shard, and make every checksum right again."""
    file = cache / "shards" / f"0000{index}.safetensors"
    save_file({**load_file(file), **tensors}, file)
    manifest = read_json(cache / "manifest.json", made_by="")
    manifest["shards"][index] |= {"sha256": sha256(file), "bytes": file.stat().st_size}
    file.with_suffix(".json").write_bytes(json_bytes(manifest["shards"][index]))
    (cache / "manifest.json").write_bytes(json_bytes(manifest))


def test_wrong_content_under_right_checksums_is_found_and_repaired(finished, copy):
    shard = load_file(copy / "shards" / "00001.safetensors")
    nan = shard["features"].clone()
    nan[int(shard["offsets"][2]) + 1, 5] = float("nan")
    ids, mask, offsets = (shard[name].clone() for name in ("input_ids", "loss_mask", "offsets"))
    ids[7] += 1
    mask[3] ^= True
    offsets[1] -= 1
    first = FeatureCache(copy).ids[
        len(load_file(copy / "shards" / "00000.safetensors")["offsets"]) - 1 :
    ]
    for changed, found in [
        ({"features": nan}, f"1 features that are not finite, the first in '{first[2]}'"),
        ({"features": shard["features"].half()}, "features ('F16', "),
        ({"features": shard["features"][:-1]}, "features ('BF16', "),
        ({"features": shard["features"] * 2}, "not what the manifest says"),
        ({"input_ids": ids}, f"input_ids[7] is {int(ids[7])}"),
        ({"loss_mask": mask}, f"loss_mask[3] is {bool(mask[3])}"),
        ({"offsets": offsets}, f"offsets[1] is {int(offsets[1])}"),
        ({"extra": torch.zeros(1)}, "extra ('F32', [1])"),
    ]:
        sign(copy, 1, **changed)
        problems = look(copy).problems
        assert len(problems) == 1 and problems[0].found.startswith(found), (found, problems)
        assert problems[0].file.startswith("shards/00001.")
        assert look(copy, repair=True).is_whole
        assert contents(copy) == contents(finished["auto"]), found


def test_json_that_says_the_same_in_other_bytes_is_written_again(finished, copy):
    for name in ("manifest.json", "shards/00001.json"):
        (copy / name).write_text(json.dumps(read_json(copy / name, made_by="")))
        assert [p.found for p in look(copy).problems] == ["the same values written in another way"]
        assert look(copy, repair=True).is_whole
        assert contents(copy) == contents(finished["auto"])


def test_tokens_are_not_made_from_shards_that_hold_others(copy):
    ids = load_file(copy / "shards" / "00001.safetensors")["input_ids"]
    sign(copy, 1, input_ids=ids + 1)
    (copy / "tokens.safetensors").unlink()
    before = contents(copy)
    with pytest.raises(RuntimeError, match=r"hold other tokens than its plan.*ANOTHER_FOLDER"):
        look(copy, repair=True)
    assert contents(copy) == before


def test_a_repair_that_fails_leaves_an_unfinished_cache_and_goes_on(finished, copy, monkeypatch):
    replace = Path.replace

    def fill_up(self: Path, target: Path) -> Path:
        if target.name == "00001.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace(self, target)

    damage(copy / "shards" / "00001.safetensors", "flipped")
    (copy / "shards" / "00002.json").unlink()
    monkeypatch.setattr(Path, "replace", fill_up)
    with pytest.raises(RuntimeError, match=r"Cannot write .*00001.safetensors"):
        look(copy, repair=True)
    monkeypatch.undo()
    assert not (copy / "manifest.json").exists()
    assert look(copy).not_done == [1]
    assert look(copy, repair=True).is_whole
    assert contents(copy) == contents(finished["auto"])


def test_an_unfinished_cache_says_how_far_it_is_and_the_command_that_goes_on(finished, copy):
    (copy / "manifest.json").unlink()
    for file in (copy / "shards").glob("00001.*"):
        file.unlink()
    found = look(copy)
    assert not found.problems and not found.is_whole
    assert found.not_done == [1]
    command = next(line for line in text(found).splitlines() if "scripts.dump_features" in line)
    assert "unfinished, 2 of 3 shards are done" in text(found)
    result = subprocess.run([sys.executable, *command.split()[1:]], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert contents(copy) == contents(finished["auto"])


def test_another_target_is_named_by_its_fields_and_refused_for_repairs(copy, tmp_path):
    other = save_tiny_target(tmp_path / "other", tiny_llama_config(rms_norm_eps=1e-3), seed=1)
    target = TargetConfig(path=str(other), device="cpu")
    found = look(copy, target=target)
    assert [p.file for p in found.problems] == ["target: config", "target: weights"]
    assert "Repair it" not in text(found)
    before = contents(copy)
    damage(copy / "shards" / "00001.safetensors", "cut")
    with pytest.raises(ValueError, match=r"not the target that .* was made from:\n  config: "):
        look(copy, target=target, repair=True)
    assert {**contents(copy), "shards/00001.safetensors": b""} == {
        **before,
        "shards/00001.safetensors": b"",
    }


def test_a_target_that_moved_repairs_under_its_new_path(finished, copy, target_path, tmp_path):
    moved = shutil.copytree(target_path, tmp_path / "moved")
    damage(copy / "shards" / "00002.safetensors", "flipped")
    look(copy, target=TargetConfig(path=str(moved), device="cpu"), repair=True)
    assert contents(copy) == contents(finished["auto"])


def test_files_that_are_not_of_the_cache_are_named_and_left_alone(finished, copy):
    (copy / "notes.txt").write_text("mine")
    (copy / "shards" / "00009.safetensors").write_bytes(b"")
    found = look(copy, repair=True)
    assert found.is_whole
    assert found.strangers == ["notes.txt", "shards/00009.safetensors"]
    assert "left alone: notes.txt, shards/00009.safetensors" in text(found)
    assert (copy / "notes.txt").exists()


def test_a_folder_without_a_plan_is_an_error_that_says_what_is_needed(tmp_path):
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(FileNotFoundError, match=r"Give cache=FOLDER of a feature cache"):
            look(folder)


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "scripts.inspect_cache", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_command_exits_with_1_on_damage_and_0_when_it_is_repaired(copy, tmp_path):
    damage(copy / "shards" / "00000.safetensors", "flipped")
    file = tmp_path / "report.json"
    result = run(f"cache={copy}", f"json={file}")
    assert result.returncode == 1
    assert "1 problem\n" in result.stdout and "shards/00000.safetensors" in result.stdout
    [command] = [line for line in result.stdout.splitlines() if "repair=true" in line]
    assert [p["file"] for p in json.loads(file.read_text())["problems"]] == [
        "shards/00000.safetensors"
    ]
    result = run(*command.split("`")[1].split()[3:])
    assert result.returncode == 0, result.stderr
    assert "whole. All 3 shards" in result.stdout
    assert "damaged: shards/00000.safetensors" in result.stdout
    assert json.loads(file.read_text())["is_whole"] is False


def test_training_on_a_cut_shard_names_the_command_that_repairs_it(copy):
    damage(copy / "shards" / "00001.safetensors", "cut")
    with pytest.raises(ValueError, match=rf"scripts.inspect_cache cache={copy} repair=true"):
        FeatureCache(copy)
