"""The settings of the data stages: type, default, unit and one comment each."""

from dataclasses import dataclass, field, replace

from omegaconf import MISSING

TARGET_ENGINES = ("transformers", "vllm")
DEVICE_MAPS = (None, "auto", "balanced", "sequential")
FEATURE_DTYPES = ("auto", "int8")
COLORS = ("auto", "always", "never")


def one_of(name: str, value: object, known: tuple) -> None:
    """Raises ValueError unless a setting has one of its known values."""
    if value not in known:
        expected = ", ".join("null" if choice is None else str(choice) for choice in known)
        raise ValueError(f"{name} is {value!r}, expected one of {expected}.")


@dataclass
class TargetConfig:
    """The frozen language model that is to be sped up."""

    path: str = MISSING  # hub id, or a folder with config.json and weights
    revision: str | None = None  # hub revision
    dtype: str = "auto"  # auto (the target's own), bfloat16, float16 or float32
    device: str = "auto"  # auto (a GPU when there is one), cpu, cuda, cuda:1, ...
    trust_remote_code: bool = False  # run Python code that comes with the checkpoint
    # One target over several GPUs: auto, balanced or sequential, as in Transformers.
    device_map: str | None = None
    engine: str = "transformers"  # what computes features: transformers or vllm (dump only)
    tensor_parallel: int = 1  # GPUs that one target is cut over (engine=vllm only)

    def __post_init__(self) -> None:
        one_of("target.engine", self.engine, TARGET_ENGINES)
        one_of("target.device_map", self.device_map, DEVICE_MAPS)
        if self.tensor_parallel < 1:
            raise ValueError(
                f"target.tensor_parallel is {self.tensor_parallel}, expected 1 or more."
            )
        spread = "device_map" if self.device_map else "engine=vllm" if self.engine == "vllm" else ""
        if spread and self.device != "auto":
            raise ValueError(
                f"target.{spread} chooses the devices itself, but target.device is {self.device}. "
                "Leave target.device out, and hide GPUs with CUDA_VISIBLE_DEVICES."
            )
        if self.engine == "vllm" and self.device_map:
            raise ValueError(
                "target.device_map spreads a target of engine=transformers; with engine=vllm give "
                "target.tensor_parallel=N."
            )
        if self.tensor_parallel > 1 and self.engine != "vllm":
            raise ValueError(
                f"target.tensor_parallel={self.tensor_parallel} needs target.engine=vllm; "
                "Transformers spreads a target with target.device_map=auto."
            )


def or_known(config: TargetConfig, fingerprint: dict[str, str]) -> TargetConfig:
    """`config`, or, if it has no path, where `fingerprint` says that the target lay."""
    if config.path:
        return config
    return replace(config, path=fingerprint["path"], revision=fingerprint["revision"] or None)


@dataclass
class DatasetConfig:
    """The chats, in ShareGPT form."""

    # A JSON array or JSON lines (also .gz), a folder of JSON or parquet files, or a hub id.
    path: str = MISSING
    name: str | None = None  # subset of a hub data set
    split: str = "train"  # of a folder or a hub data set
    revision: str | None = None  # hub revision
    limit: int | None = None  # use only the first N usable conversations
    allow_truncated: bool = False  # use the whole records of a file that is cut off
    max_dropped: float = 0.5  # stop when a larger share of the records is unusable
    allow_implausible: bool = False  # dump although the statistics of the mask look wrong


@dataclass
class DumpConfig:
    """Chats and a target in, a feature cache out."""

    target: TargetConfig = MISSING
    dataset: DatasetConfig = MISSING
    out: str = MISSING  # folder of the feature cache
    max_length: int = 2048  # tokens; longer sequences are cut
    shard_tokens: int = 65536  # tokens in one shard file
    batch_tokens: int | None = None  # tokens in one forward; null: 2048 on CPU, 16384 else
    feature_dtype: str = "auto"  # bfloat16 (float16 for such a target), or int8: half the bytes
    dry_run: bool = False  # print the plan (bytes, time) and stop

    def __post_init__(self) -> None:
        for name in ("max_length", "shard_tokens", "batch_tokens"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} is {value}, but must be at least 1.")
        one_of("feature_dtype", self.feature_dtype, FEATURE_DTYPES)


@dataclass
class InspectConfig:
    """A feature cache in, what is wrong with it and what it holds on the terminal."""

    cache: str = MISSING  # folder of the feature cache
    # Compared with what the cache was made from. For a repair an empty path means: where it lay.
    target: TargetConfig = field(default_factory=lambda: TargetConfig(path=""))
    repair: bool = False  # do again what is damaged or missing, and nothing else
    json: str | None = None  # also write the report as JSON to this file


@dataclass
class PreviewConfig:
    """Chats and a target's tokenizer in, what a dump would store of them on the terminal."""

    target: TargetConfig = MISSING  # its tokenizer; no weights are loaded
    dataset: DatasetConfig = MISSING
    max_length: int = 2048  # as in the dump
    show: int = 3  # sequences, drawn from all of them
    seed: int = 0  # of the draw
    # These chats instead, without statistics of all; an id of digits needs quotes: ids=["'7_1'"].
    ids: list[str] = field(default_factory=list)
    color: str = "auto"  # auto (on a terminal, unless NO_COLOR is set), always or never
    max_chars: int | None = 4000  # characters shown of one sequence; null: all
    html: str | None = None  # also write a page, with the whole of these sequences

    def __post_init__(self) -> None:
        one_of("color", self.color, COLORS)
        for name, least in (("max_length", 1), ("show", 0), ("max_chars", 100)):
            value = getattr(self, name)
            if isinstance(value, int) and value < least:
                raise ValueError(f"{name} is {value}, but must be at least {least}.")


@dataclass
class RegenerateConfig:
    """Chats in, the same chats with replies that the target wrote out."""

    target: TargetConfig = MISSING  # with an endpoint: the model there; checks what comes back
    dataset: DatasetConfig = MISSING
    out: str = MISSING  # chat file, JSON lines; whose replies it holds is said in OUT.origin.json
    # http://HOST:PORT/v1 of a server (vLLM, SGLang, ...) that writes; null: Transformers, here.
    endpoint: str | None = None
    model: str | None = None  # its name at the endpoint; null: the only one there
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0  # sample from the likeliest tokens that hold this share; 1: from all
    seed: int = 0  # each reply is drawn from seed, id of the chat and number of the reply alone
    max_new_tokens: int = 1024  # tokens of one reply; a chat ends before a reply that needs more
    max_length: int = 2048  # tokens of a chat; it ends before the reply that does not fit
    # Tokens of one batch, replies included; null: 8192 on CPU, 65536 else. No endpoint only.
    batch_tokens: int | None = None
    concurrency: int = 32  # chats in flight at the endpoint

    def __post_init__(self) -> None:
        for name in ("max_length", "batch_tokens", "concurrency"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} is {value}, but must be at least 1.")
        for name, ok, expected in (
            ("max_new_tokens", self.max_new_tokens >= 2, "at least 2: a word and its end"),
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be {expected}.")
        if self.model and not self.endpoint:
            raise ValueError(
                f"model={self.model} is a name at an endpoint. Give endpoint=http://HOST:PORT/v1, "
                "or leave model out: target=... says which model answers here."
            )


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
