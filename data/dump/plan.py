"""The plan of a dump: every token, and which shard it goes to, before the target runs.

It depends on the chats, the target and the settings alone, never on the number of processes.
"""

import hashlib
import importlib.metadata
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from data.cache.reader import FORMAT_VERSION, REPAIR, check_version
from data.chats.plausible import check_plausible
from data.chats.sources import source_digest
from data.chats.statistics import measure, pieces, summary
from data.chats.template import control_tokens
from data.chats.tokens import Tokens, load_tokens, save_tokens, tokenise
from data.config import DatasetConfig, DumpConfig
from data.files import free_space, json_bytes, read_json, readable_size, sha256, write_json, writing
from data.replies.origin import replies_of

log = logging.getLogger(__name__)

MADE_BY = "python -m scripts.dump_features"
# The way out where the plan is lost: nothing else in a cache says what it says.
ANEW = (
    f"`{MADE_BY}` with the same settings and out=ANOTHER_FOLDER writes the same plan.json and "
    "tokens.safetensors before its first shard: stop it then, and copy both from there."
)
# What a folder may hold before there is a plan: traces of a dump that was stopped while planning.
LEFTOVERS = ("shards", ".lock", "tokens.safetensors", "*.tmp", ".tmp*")
TOKEN_BYTES = 4 + 1  # input_ids int32, loss_mask bool
SCALE_BYTES = 4  # token_scale float32, and channel_scale: with int8 only
SHARD_OVERHEAD = 2048  # bytes, at most: safetensors header and the JSON record of one shard


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What plan.json says."""

    fingerprint: dict[str, str]  # of the target
    settings: dict[str, Any]  # all that decides the content of the cache
    versions: dict[str, str]  # of the libraries that made the plan
    counts: dict[str, Any]  # conversations read, dropped and mended, by reason
    replies: dict[str, Any]  # whose they are (data/replies/origin.py)
    statistics: dict[str, Any]  # of all sequences: lengths, replies, mask (statistics.py)
    hidden_size: int
    feature_dtype: str
    num_tokens: int
    num_supervised: int
    tokens_sha256: str  # of tokens.safetensors
    sequence_ids: list[str]
    shards: list[list[int]]  # [first, last) sequence of each shard
    format_version: int = FORMAT_VERSION

    @property
    def overhead_per_token(self) -> int:
        """Bytes of all but the feature's own numbers."""
        return TOKEN_BYTES + (SCALE_BYTES if self.feature_dtype == "int8" else 0)

    @property
    def bytes_per_token(self) -> int:
        itemsize = getattr(torch, self.feature_dtype).itemsize
        return self.hidden_size * itemsize + self.overhead_per_token

    @property
    def num_bytes(self) -> int:
        """Of the whole cache: exact for the tensors, rounded up for headers and records."""
        offsets = 8 * (len(self.sequence_ids) + len(self.shards))
        tokens = self.num_tokens * TOKEN_BYTES + 8 * (len(self.sequence_ids) + 1)
        names = sum(len(name.encode()) + 8 for name in self.sequence_ids)
        overhead = SHARD_OVERHEAD * (len(self.shards) + 2)
        if self.feature_dtype == "int8":  # the calibration, and its record here and in the manifest
            overhead += self.hidden_size * SCALE_BYTES + SHARD_OVERHEAD
        return self.num_tokens * self.bytes_per_token + offsets + tokens + names + overhead


def dataset_settings(config: DatasetConfig) -> dict[str, Any]:
    """The settings that decide which chats are read; the chats by content, not by path."""
    dataset = asdict(config)
    for only_a_limit in ("max_dropped", "allow_implausible"):
        dataset.pop(only_a_limit)
    dataset["sha256"] = source_digest(config)
    return {f"dataset.{key}": value for key, value in dataset.items()}


def settings_of(config: DumpConfig, *, dtype: torch.dtype, batch_tokens: int) -> dict[str, Any]:
    """The settings that decide the content of a cache."""
    return {
        **dataset_settings(config.dataset),
        "target.dtype": str(dtype).removeprefix("torch."),
        "target.engine": config.target.engine,
        "feature_dtype": feature_dtype(config, dtype),
        "max_length": config.max_length,
        "shard_tokens": config.shard_tokens,
        "batch_tokens": batch_tokens,
    }


def auto_feature_dtype(dtype: torch.dtype) -> str:
    """What the features of a target of that dtype are stored as by default."""
    # The size of a float32 feature buys nothing: bf16 rounding moves .2 % of the argmaxes.
    return "float16" if dtype == torch.float16 else "bfloat16"


def feature_dtype(config: DumpConfig, dtype: torch.dtype) -> str:
    """What features are stored as. dtype: the target's"""
    return auto_feature_dtype(dtype) if config.feature_dtype == "auto" else config.feature_dtype


def settings_differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """One readable line for each setting that differs."""
    same_data = ours.get("dataset.sha256") == theirs.get("dataset.sha256") is not None
    place = ("dataset.path", "dataset.revision")
    fields = [k for k in {**theirs, **ours} if not (k in place and same_data)]
    return [
        f"{key}: {theirs.get(key)} there, {ours.get(key)} now"
        for key in fields
        if ours.get(key) != theirs.get(key)
    ]


def cut_shards(lengths: Iterable[int], shard_tokens: int) -> list[list[int]]:
    """[first, last) sequence of each shard: in order, up to `shard_tokens` or one sequence."""
    shards: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if not shards or length > room:
            shards.append([index, index])
            room = shard_tokens
        shards[-1][1] = index + 1
        room -= length
    return shards


def make_plan(
    config: DumpConfig,
    tokenizer: Any,
    folder: Path,
    *,
    fingerprint: dict[str, str],
    settings: dict[str, Any],
    text_config: Any,
    dtype: torch.dtype,
) -> tuple[Plan, Tokens]:
    """Tokenise everything and cut it into shards. Writes nothing but unnamed files in `folder`.

    Raises ValueError for tokens that the target cannot take, and for implausible ones.
    """
    ids, tokens, counts = tokenise(tokenizer, config, folder)
    _check_tokens(tokens, text_config, engine=config.target.engine)
    log.info("%s", counts.summary())
    statistics = measure(
        pieces(tokens),
        max_length=config.max_length,
        end_tokens=control_tokens(tokenizer),
        spell=tokenizer.decode,
    )
    log.info("%s", summary(statistics))
    check_plausible(statistics, config.dataset)
    plan = Plan(
        fingerprint=fingerprint,
        settings=settings,
        versions={name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        counts=counts.to_json(),
        replies=replies_of(config.dataset.path, checksum=settings["dataset.sha256"]),
        statistics=asdict(statistics),
        hidden_size=text_config.hidden_size,
        feature_dtype=feature_dtype(config, dtype),
        num_tokens=len(tokens.input_ids),
        num_supervised=statistics.pairs,
        tokens_sha256="",
        sequence_ids=ids,
        shards=cut_shards(tokens.lengths.tolist(), config.shard_tokens),
    )
    return plan, tokens


def _check_tokens(tokens: Tokens, text_config: Any, *, engine: str) -> None:
    longest, positions = int(tokens.lengths.max()), text_config.max_position_embeddings
    usable = positions - (engine == "vllm")  # it wants to decode one token
    if longest > usable:
        raise ValueError(
            f"The longest sequence has {longest} tokens, but the target knows {positions} "
            f"positions (max_position_embeddings). Set max_length={usable} or less."
        )
    largest = int(tokens.input_ids.max())
    if largest >= text_config.vocab_size:
        raise ValueError(
            f"The tokenizer gives token {largest}, but the target's vocabulary has "
            f"{text_config.vocab_size} rows. The tokenizer belongs to another model."
        )


def write_plan(out: Path, plan: Plan, tokens: Tokens) -> Plan:
    """Write the tokens, then the plan that makes them valid."""
    with writing(out / "tokens.safetensors"):
        checksum = save_tokens(out / "tokens.safetensors", tokens)
    plan = Plan(**{**vars(plan), "tokens_sha256": checksum})
    with writing(out / "plan.json"):
        write_json(out / "plan.json", {**vars(plan), "sha256": _checksum(vars(plan))})
    return plan


def read_plan(out: Path) -> Plan:
    """Raises FileNotFoundError or ValueError if there is no plan that this version can read."""
    file = out / "plan.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist. {ANEW}")
    try:
        record = read_json(file, made_by=MADE_BY)
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error.__cause__}). {ANEW}") from error
    check_version(record, file)
    if record.pop("sha256", None) != _checksum(record):
        raise ValueError(f"{file} is damaged: its checksum is another. {ANEW}")
    return Plan(**record)


def _checksum(record: dict[str, Any]) -> str:
    return hashlib.sha256(json_bytes(record)).hexdigest()


def read_tokens(out: Path, plan: Plan, *, checksum: bool = False) -> Tokens:
    """The tokens of a plan, memory-mapped."""
    file = out / "tokens.safetensors"
    if not file.is_file() or (checksum and sha256(file) != plan.tokens_sha256):
        raise ValueError(
            f"{file} is {'damaged' if file.is_file() else 'missing'}. Make it again out of the "
            f"shards with `{REPAIR.format(out)}`."
        )
    return load_tokens(file)


def check_folder(out: Path) -> None:
    """Refuse a folder that holds something else."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file. Give out=FOLDER, a new or an unfinished one.")
    if not out.is_dir() or (out / "plan.json").is_file():
        return
    ours = {path for pattern in LEFTOVERS for path in out.glob(pattern)}
    foreign = sorted(path.name for path in out.iterdir() if path not in ours)
    if foreign or any(out.glob("shards/*")):
        raise ValueError(
            f"{out} is not empty and holds no plan.json of a dump, but "
            f"{', '.join(foreign[:5]) or 'shards'}. Give out=FOLDER, a new or an unfinished one."
        )


def remove_leftovers(out: Path) -> None:
    """Delete the temporary files of a dump that was killed: ours, and those of safetensors."""
    for folder in (out, out / "shards"):
        for pattern in ("*.tmp", ".tmp*"):
            for file in folder.glob(pattern):
                file.unlink()


def check_same(out: Path, differences: list[str]) -> None:
    """Refuse to mix two dumps in one folder."""
    if differences:
        lines = "\n".join(f"  {line}" for line in differences)
        raise ValueError(
            f"{out} holds a dump made with other settings:\n{lines}\n"
            "Give another out=FOLDER, or the settings of before, or delete that folder."
        )


def check_space(out: Path, plan: Plan, *, done: int) -> None:
    """Print the size of the cache, and refuse what cannot fit. `done`: bytes already written."""
    free, existing = free_space(out)
    missing = max(plan.num_bytes - done, 0)
    log.info(
        "disk: %s tokens x (%d x %s + %d) bytes = %s, %s still to write, %s free",
        f"{plan.num_tokens:,}",
        plan.hidden_size,
        plan.feature_dtype,
        plan.overhead_per_token,
        readable_size(plan.num_bytes),
        readable_size(missing),
        readable_size(free),
    )
    margin = missing // 50 + 2**24
    if missing + margin > free:
        half = ""
        if plan.feature_dtype != "int8":
            size = readable_size(replace(plan, feature_dtype="int8").num_bytes)
            half = f"feature_dtype=int8 (the whole cache in {size}), "
        fitting = int(len(plan.sequence_ids) * max(free - margin, 0) / max(missing, 1) * 0.98)
        raise ValueError(
            f"The cache needs {missing:,} more bytes ({readable_size(missing)}) and a margin of "
            f"{readable_size(margin)}, but {existing} has {free:,} free ({readable_size(free)}). "
            f"Use fewer conversations (dataset.limit={fitting} would fit), a shorter max_length "
            f"(now {plan.settings['max_length']}), {half}or out=FOLDER on another disk."
        )
