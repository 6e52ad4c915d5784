"""The settings of the data stages: type, default, unit and one comment each."""

from dataclasses import dataclass, replace

from omegaconf import MISSING


@dataclass
class TargetConfig:
    """The frozen language model that is to be sped up."""

    path: str = MISSING  # hub id, or a folder with config.json and weights
    revision: str | None = None  # hub revision
    dtype: str = "auto"  # auto (the target's own), bfloat16, float16 or float32
    device: str = "auto"  # auto (a GPU when there is one), cpu, cuda, cuda:1, ...
    trust_remote_code: bool = False  # run Python code that comes with the checkpoint


def or_known(config: TargetConfig, fingerprint: dict[str, str]) -> TargetConfig:
    """`config`, or, if it has no path, where `fingerprint` says that the target lay."""
    if config.path:
        return config
    return replace(config, path=fingerprint["path"], revision=fingerprint["revision"] or None)


@dataclass
class DatasetConfig:
    """The chats, in ShareGPT form: a JSON array or JSON lines."""

    path: str = MISSING  # .json or .jsonl file
    limit: int | None = None  # use only the first N usable conversations
    allow_truncated: bool = False  # use the whole records of a file that is cut off
    max_dropped: float = 0.5  # stop when a larger share of the records is unusable


@dataclass
class DumpConfig:
    """Chats and a target in, a feature cache out."""

    target: TargetConfig = MISSING
    dataset: DatasetConfig = MISSING
    out: str = MISSING  # folder of the feature cache
    max_length: int = 2048  # tokens; longer sequences are cut
    shard_tokens: int = 65536  # tokens in one shard file
    batch_tokens: int | None = None  # tokens in one forward; null: 2048 on CPU, 16384 else
    dry_run: bool = False  # print the plan (bytes, time) and stop

    def __post_init__(self) -> None:
        for name in ("max_length", "shard_tokens", "batch_tokens"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} is {value}, but must be at least 1.")


@dataclass
class HeldoutPromptsConfig:
    """Chats in, the prompts of those that training never saw out."""

    dataset: DatasetConfig = MISSING
    out: str = MISSING  # prompt file, JSON lines
    limit: int | None = 80  # prompts; null: all
    share: float = 0.05  # as in training (heldout.share)
    seed: int = 0  # as in training (seed)


@dataclass
class FetchConfig:
    """Where the demo's target and chats are put."""

    out: str = "checkpoints/demo"  # folder; gets target/ and chats/
