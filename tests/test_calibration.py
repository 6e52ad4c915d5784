"""Calibrating and dumping int8 features, resuming that, and training on them."""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.batches import add_noise, pack
from data.cache import calibration
from data.cache.calibration import calibration_sequences
from data.cache.quantise import dequantise, quantise
from data.cache.reader import FeatureCache
from data.config import DatasetConfig, DumpConfig, TargetConfig
from data.dump.plan import read_plan
from data.dump.run import dump
from data.targets.model import load_target
from tests.kill_dump import contents, small_dump
from tests.tiny import save_tiny_chats, save_tiny_target, tiny_chats, tiny_llama_config
from tests.training import losses, weights
from train.config import HeadConfig, HeldoutConfig, TrainConfig
from train.fit.loop import fit

# Kills dumps just before their k-th rename, for each k given, and lets two processes go on.
KILLER = """
import sys
from pathlib import Path
from tests.kill_dump import Death, kill, run, small_dump

target, chats, folder, *numbers = sys.argv[1:]
for number in numbers:
    out = Path(folder) / number
    config = small_dump(target, chats, out, feature_dtype="int8")
    kill(config, Death("rename", int(number)), seconds=60)
    print(*sorted(file.name for file in out.glob("**/*.*") if file.suffix in (".json", ".tmp")))
    assert run(config, world=2)
"""


@pytest.fixture(scope="module")
def make_config(target_path, chats_path):
    """A config of an int8 dump in several shards, with changes."""

    def make(out: Path, **changes) -> DumpConfig:
        values = {"feature_dtype": "int8", **changes}
        return small_dump(str(target_path), str(chats_path), out, **values)

    return make


@pytest.fixture(scope="module")
def finished(make_config, tmp_path_factory) -> Path:
    return dump(make_config(tmp_path_factory.mktemp("int8") / "cache"))


@pytest.fixture(scope="module")
def plain(make_config, tmp_path_factory) -> Path:
    """The same features as bfloat16."""
    return dump(make_config(tmp_path_factory.mktemp("plain") / "cache", feature_dtype="auto"))


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def test_the_cost_is_measured_on_other_sequences_spread_over_the_data():
    lengths = torch.randint(20, 2000, (5000,), generator=torch.Generator().manual_seed(0))
    calibrated, heldout = calibration_sequences(lengths)
    assert not set(calibrated) & set(heldout)
    assert 8192 <= sum(min(int(lengths[i]), 512) for i in calibrated) < 8192 + 512
    assert 4096 <= sum(min(int(lengths[i]), 512) for i in heldout) < 4096 + 512
    for chosen in (calibrated, heldout):
        assert min(chosen) < 1000 and max(chosen) > 4000
    assert calibration_sequences(lengths) == (calibrated, heldout)


def test_little_data_is_calibrated_on_two_thirds_of_it():
    calibrated, heldout = calibration_sequences(torch.full((30,), 100))
    assert (len(calibrated), len(heldout)) == (20, 10)
    assert calibration_sequences(torch.tensor([80])) == ([0], [])


def test_an_int8_cache_reads_as_what_the_target_gave(finished, target_path):
    cache = FeatureCache(finished)
    channel_scale = cache.calibration.channel_scale
    target = load_target(TargetConfig(path=str(target_path), device="cpu"))
    assert cache.dtype == torch.float32
    for index in range(len(cache)):
        sequence = cache.sequence(index)
        features = target.features(sequence.input_ids[None])[0]
        assert sequence.features.dtype == torch.float32
        assert (sequence.features - features).norm() < 0.01 * features.norm()
        # Rounded once, from what the target gave, and not by way of bfloat16.
        rounded = dequantise(*quantise(features, channel_scale), channel_scale)
        assert (sequence.features - rounded).norm() < 0.001 * features.norm()


def test_both_formats_hold_the_same_tokens(finished, plain):
    ours, theirs = FeatureCache(finished), FeatureCache(plain)
    assert ours.ids == theirs.ids
    for index in range(len(ours)):
        for mine, other in zip(ours.tokens(index), theirs.tokens(index), strict=True):
            assert torch.equal(mine, other)


def test_a_token_costs_a_byte_a_channel_and_nine(finished, plain):
    plan = read_plan(finished)
    assert plan.bytes_per_token == 32 + 9
    num_bytes = 0
    for file in sorted((finished / "shards").glob("*.safetensors")):
        tensors = load_file(file)
        assert tensors["features"].dtype == torch.int8
        sizes = {name: t.nbytes for name, t in tensors.items() if name != "offsets"}
        num_bytes += sum(sizes.values())
        assert sum(sizes.values()) == len(tensors["input_ids"]) * plan.bytes_per_token
    assert num_bytes == plan.num_tokens * plan.bytes_per_token
    for folder in (finished, plain):
        whole = sum(len(content) for content in contents(folder).values())
        said = read_plan(folder).num_bytes
        assert whole <= said <= whole + 2048 * 6


def test_the_cost_is_printed_and_kept(make_config, finished, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        out = dump(make_config(tmp_path / "cache"))
    record = FeatureCache(out).manifest["calibration"]
    assert record == json.loads((out / "calibration.json").read_text())
    assert record["heldout_tokens"] > 1000
    ours, plain = record["costs"]["int8"], record["costs"]["bfloat16"]
    assert 0 < plain["kl"] < ours["kl"] < 1e-3
    assert 0 <= plain["flips"] < ours["flips"] < 0.03
    assert 0.001 < plain["error"] < 0.002 < ours["error"] < 0.01
    line = rf"int8: KL {ours['kl']:.5f}, {100 * ours['flips']:.2g} % of argmaxes changed, "
    assert line in caplog.text
    assert "bfloat16: KL" in caplog.text
    assert "int8: 41 instead of 69 bytes a token" in caplog.text
    assert "feature_dtype=auto" not in caplog.text
    assert contents(out) == contents(finished)


def test_a_target_that_int8_blurs_is_warned_of(make_config, tmp_path, caplog):
    """One channel is far louder than the others, and its output head does not listen to it."""
    path = save_tiny_target(tmp_path / "target", tiny_llama_config(tie_word_embeddings=False))
    state = load_file(path / "model.safetensors")
    state["model.norm.weight"][3] = 1e6
    state["lm_head.weight"][:, 3] = 0
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    dump(make_config(tmp_path / "cache", target=TargetConfig(path=str(path), device="cpu")))
    assert "of this target's most likely tokens, more than 3 %" in caplog.text
    assert "feature_dtype=auto" in caplog.text


def test_a_kill_around_the_calibration_and_two_processes_change_no_byte(
    finished, target_path, chats_path, tmp_path
):
    left = {  # by the number of the rename
        "3": "calibration.json.tmp plan.json",
        "4": "00000.safetensors.tmp calibration.json plan.json",
    }
    result = subprocess.run(
        [sys.executable, "-c", KILLER, str(target_path), str(chats_path), str(tmp_path), *left],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == list(left.values())
    for number in left:
        assert contents(tmp_path / number) == contents(finished), number


def damage(file: Path, how: str) -> None:
    if how == "missing":
        file.unlink()
    else:
        content = bytearray(file.read_bytes())
        content[-2] ^= 1
        file.write_bytes(content)


@pytest.mark.parametrize("how", ["missing", "flipped"])
@pytest.mark.parametrize("unfinished", [False, True])
def test_a_lost_calibration_is_computed_again(how, unfinished, make_config, finished, copy, caplog):
    damage(copy / "calibration.safetensors", how)
    if unfinished:
        (copy / "manifest.json").unlink()
        (copy / "shards" / "00001.json").unlink()
    else:
        found = "missing" if how == "missing" else "damaged"
        with pytest.raises(ValueError, match=rf"calibration.safetensors is {found}, .*Run the sa"):
            FeatureCache(copy)
    dump(make_config(copy))
    assert unfinished or "the calibration" in caplog.text
    assert contents(copy) == contents(finished)


def test_a_lost_calibration_record_is_written_again(make_config, finished, copy):
    (copy / "calibration.json").write_text('{"sha256": "abc')
    FeatureCache(copy)  # reads the manifest's
    dump(make_config(copy))
    assert contents(copy) == contents(finished)


def test_shards_of_another_calibration_are_refused(make_config, copy):
    (copy / "manifest.json").unlink()
    (copy / "calibration.safetensors").unlink()
    file = copy / "shards" / "00001.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "calibration": "f00d" * 16}))
    with pytest.raises(ValueError, match=r"00001.safetensors was quantised with .* f00d"):
        dump(make_config(copy))
    assert not (copy / "calibration.safetensors").exists()


def test_a_cache_of_one_sequence(make_config, tmp_path):
    out = dump(make_config(tmp_path / "cache", dataset=one_chat(tmp_path)))
    cache = FeatureCache(out)
    assert len(cache) == 1
    record = cache.manifest["calibration"]
    assert record["calibration_tokens"] + record["heldout_tokens"] == cache.lengths.sum()
    assert record["heldout_tokens"] == cache.lengths.sum() // 3
    assert cache.sequence(0).features.isfinite().all()


def one_chat(folder: Path) -> DatasetConfig:
    return DatasetConfig(path=str(save_tiny_chats(folder / "chats.json", 1)))


def test_a_target_in_float16_is_compared_with_float16(make_config, tmp_path, target_path):
    target = TargetConfig(path=str(target_path), device="cpu", dtype="float16")
    out = dump(make_config(tmp_path / "cache", dataset=one_chat(tmp_path), target=target))
    costs = FeatureCache(out).manifest["calibration"]["costs"]
    assert costs["float16"] == {"kl": 0.0, "flips": 0.0, "error": 0.0}  # it stores what it is
    assert costs["int8"]["error"] > 0


@pytest.mark.parametrize("sampled", [True, False])
def test_a_feature_that_is_not_finite_is_refused(sampled, make_config, tmp_path, monkeypatch):
    """Before anything is written that it spoils, also where the calibration has not seen it."""
    if not sampled:
        monkeypatch.setattr(calibration, "CALIBRATION_TOKENS", 100)
        monkeypatch.setattr(calibration, "HELDOUT_TOKENS", 100)
    target = save_tiny_target(tmp_path / "target", tiny_llama_config(tie_word_embeddings=False))
    state = load_file(target / "model.safetensors")
    token = json.loads((target / "tokenizer.json").read_text())["model"]["vocab"]["z"]
    state["model.embed_tokens.weight"][token] = float("nan")
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    chats = tiny_chats(24)
    chats[17]["conversations"][1]["value"] = "Zzz."
    (tmp_path / "chats.json").write_text(json.dumps(chats))
    config = make_config(
        tmp_path / "cache",
        target=TargetConfig(path=str(target), device="cpu"),
        dataset=DatasetConfig(path=str(tmp_path / "chats.json")),
    )
    with pytest.raises(ValueError, match=r"not finite in torch.float32: .* 'chat17_0'"):
        dump(config)
    assert (tmp_path / "cache" / "calibration.json").exists() != sampled
    assert not (tmp_path / "cache" / "manifest.json").exists()


def test_another_feature_dtype_is_refused_by_name(make_config, copy):
    with pytest.raises(ValueError, match=r"feature_dtype: int8 there, bfloat16 now"):
        dump(make_config(copy, feature_dtype="auto"))


def test_what_does_not_fit_is_offered_as_int8(make_config, finished, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**9, 10**9 - 16_900_000, 16_900_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    size = round(read_plan(finished).num_bytes / 1000)
    with pytest.raises(ValueError, match=rf"feature_dtype=int8 \(the whole cache in {size} kB\)"):
        dump(make_config(tmp_path / "cache", feature_dtype="auto"))
    with pytest.raises(ValueError, match=r"16,900,000 free") as error:
        dump(make_config(tmp_path / "cache"))
    assert "feature_dtype" not in str(error.value)


def test_batches_of_an_int8_cache_are_float32(finished):
    cache = FeatureCache(finished)
    batch, empty = pack(cache, [2, 5]), pack(cache, [])
    for features in (batch.features, batch.target_features, empty.features, empty.target_features):
        assert features.dtype == torch.float32
    length = batch.lengths[0]
    assert torch.equal(batch.features[:length], cache.sequence(2).features[:length])
    noise = add_noise(batch, kind="paper", width=0.1, seed=0, epoch=0) - batch.features
    assert 0.09 < noise.abs().max() <= 0.1 + 1e-5


@pytest.mark.parametrize("init", ["random", "regression"])
def test_training_on_int8_is_training_on_bfloat16_but_for_rounding(init, finished, plain, tmp_path):
    config = TrainConfig(
        max_steps=2,
        batch_tokens=1000,
        lr=3e-3,
        save_every=2,
        head=HeadConfig(init=init),
        heldout=HeldoutConfig(share=0.2),
    )
    ours, theirs = tmp_path / "int8", tmp_path / "bfloat16"
    length = fit(replace(config, features=str(finished), out=str(ours)))
    assert length == pytest.approx(
        fit(replace(config, features=str(plain), out=str(theirs))), abs=0.1
    )
    for mine, other in zip(losses(ours), losses(theirs), strict=True):
        assert mine == pytest.approx(other, rel=2e-3)
    expected = weights(theirs, 2)
    for name, tensor in weights(ours, 2).items():
        assert (tensor - expected[name]).norm() < 0.05 * expected[name].norm().clamp(min=1), name


def test_a_run_says_what_its_features_were_stored_as(finished, tmp_path, caplog):
    config = TrainConfig(
        features=str(finished),
        out=str(tmp_path),
        max_steps=1,
        batch_tokens=1000,
        heldout=HeldoutConfig(share=0.2),
    )
    with caplog.at_level(logging.INFO):
        fit(config)
    assert "features: int8 (KL " in caplog.text
    record = json.loads((tmp_path / "steps" / "000001" / "checkpoint.json").read_text())
    assert record["cache"]["dtype"] == "int8"
