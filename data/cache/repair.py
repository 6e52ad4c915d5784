"""Does again what is damaged in a cache, by the dump's own code, and nothing else."""

import importlib.metadata
import logging
import shlex
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from data.cache.evidence import Record, json_problems
from data.cache.manifest import write_manifest
from data.cache.reader import calibration_path, shard_path
from data.cache.verify import Findings, verify
from data.chats.tokens import Tokens
from data.config import DatasetConfig, DumpConfig, TargetConfig, or_known
from data.dump.plan import ANEW, Plan, remove_leftovers
from data.dump.run import lock_cache, run_shards
from data.files import atomic_write, sha256, write_json, writing
from data.targets.model import fingerprint, fingerprint_differences

log = logging.getLogger(__name__)


def repair(out: Path, target: TargetConfig) -> Findings:
    """Make a cache what an undisturbed dump had made of its plan, and verify it again.

    target: what to run where features are lost; an empty path: the cache's own

    Raises ValueError for another target than the cache's, RuntimeError for tokens that cannot be
    had from the shards, and what a dump raises.
    """
    with lock_cache(out):
        found = verify(out)
        if found.is_whole:
            log.info("%s is whole: nothing to repair.", out)
            return found
        for problem in found.problems:
            log.info("damaged: %s", problem.file)
        remove_leftovers(out)
        if found.tokens is None:
            rebuild_tokens(found)
        lost = sorted(set(range(len(found.plan.shards))) - found.records.keys())
        loses_calibration = found.plan.feature_dtype == "int8" and found.calibration is None
        config = dump_config(found.plan, out, or_known(target, found.plan.fingerprint))
        if lost or loses_calibration:
            _check_origin(found.plan, config)
        _mend_records(found)
        if lost or loses_calibration:
            run_shards(config, out, found.plan, rank=0, world=1)
        write_manifest(out, found.plan)
        return verify(out)


def rebuild_tokens(found: Findings) -> None:
    """Put tokens.safetensors together from the shards, which hold each token once more.

    Raises RuntimeError if that does not give the tokens of the plan.
    """
    out, plan = found.out, found.plan
    parts: dict[str, list[torch.Tensor]] = {"input_ids": [], "loss_mask": []}
    lengths = []
    for index in range(len(plan.shards)):
        try:
            with safe_open(shard_path(out, index), framework="pt") as shard:
                for name, tensors in parts.items():
                    tensors.append(shard.get_tensor(name))
                lengths.append(shard.get_tensor("offsets").diff())
        except (SafetensorError, FileNotFoundError) as error:
            raise RuntimeError(
                f"tokens.safetensors and shard {index} of {out} are both damaged ({error}), so "
                f"that the tokens of that shard are nowhere. {ANEW}"
            ) from error
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), *lengths]).cumsum(0)
    tokens = Tokens(
        **{name: torch.cat(tensors) for name, tensors in parts.items()}, offsets=offsets
    )
    file = out / "tokens.safetensors"
    with writing(file), atomic_write(file) as tmp:
        save_file(vars(tokens), tmp)
        if sha256(tmp) != plan.tokens_sha256:
            raise RuntimeError(
                f"The shards of {out} hold other tokens than its plan: tokens.safetensors cannot "
                f"be made again from them. {ANEW}"
            )
    log.info("tokens.safetensors: made again from the shards")


def _mend_records(found: Findings) -> None:
    """Write the records that are known, and take those away that a dump must not believe."""
    out = found.out
    records: dict[Path, Record | None] = {
        shard_path(out, index): found.records.get(index) for index in range(len(found.plan.shards))
    }
    if found.plan.feature_dtype == "int8":
        records[calibration_path(out)] = found.calibration
    with writing(out):
        for path, record in records.items():
            file = path.with_suffix(".json")
            if record is None:
                file.unlink(missing_ok=True)
            elif json_problems(file, record):
                write_json(file, record)
        # Last, as it may be the only one that knew the records: from here on a dump could go on.
        (out / "manifest.json").unlink(missing_ok=True)


def _check_origin(plan: Plan, config: DumpConfig) -> None:
    """Only what made the other shards may make these."""
    differences = fingerprint_differences(fingerprint(config.target), plan.fingerprint)
    if differences:
        lines = "\n".join(f"  {line}" for line in differences)
        raise ValueError(
            f"{config.target.path} is not the target that {config.out} was made from:\n{lines}\n"
            "Give target=PATH with that one."
        )
    for name, version in plan.versions.items():
        if (ours := importlib.metadata.version(name)) != version:
            log.warning(
                "warning: the cache was made with %s %s, this is %s: what is done again may differ "
                "from the rest by rounding.",
                name,
                version,
                ours,
            )


def dump_config(plan: Plan, out: Path, target: TargetConfig) -> DumpConfig:
    """The settings of the dump that made a plan, with a given target at the plan's settings."""
    settings = plan.settings

    def of(prefix: str, schema: type) -> dict[str, Any]:
        names = (field.name for field in fields(schema))
        return {name: settings[prefix + name] for name in names if prefix + name in settings}

    own = of("", DumpConfig)
    if own["feature_dtype"] != "int8":  # it follows from the target's
        own["feature_dtype"] = "auto"
    return DumpConfig(
        **own,
        target=replace(target, **of("target.", TargetConfig)),
        dataset=DatasetConfig(**of("dataset.", DatasetConfig)),
        out=str(out),
    )


def dump_command(plan: Plan, out: Path) -> str:
    """The command that goes on with a dump."""
    target = or_known(TargetConfig(path=""), plan.fingerprint)
    words = _overrides(dump_config(plan, out, target))
    return " ".join(["python -m scripts.dump_features", *map(shlex.quote, words)])


def _overrides(config: Any, prefix: str = "") -> Iterator[str]:
    """Each setting that is not the default, as the command line takes it."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from _overrides(value, f"{field.name}.")
        elif value != field.default:
            name = f"{prefix}{field.name}".removesuffix(".path")
            yield f"{name}={'null' if value is None else value}"
