"""The settings of training, export and measuring: type, default, unit and one comment each."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from data.config import COLORS, TargetConfig, one_of

NOISES = ("paper", "reference", "none")
ENGINES = ("vllm", "sglang", "eagle")
TRACKERS = ("wandb", "tensorboard")
INITS = ("random", "regression")
INPUTS = ("feature_token", "token", "feature")
TREES = ("chain", "static", "dynamic", "auto")
BASELINES = ("prompt_lookup", "assistant")


def flat(settings: dict, prefix: str = "") -> dict[str, object]:
    """Nested settings under their dotted names, as on the command line; tuples become lists."""
    found: dict[str, object] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = list(value) if isinstance(value, tuple) else value
    return found


@dataclass
class HeadConfig:
    """The shape of the head. Everything else about it comes from the target."""

    intermediate_size: int | None = None  # MLP width; null: the target's (dense equivalent)
    init: str = "random"  # random, or regression: fc from least squares on the cache
    # What fc reads. Engines build feature_token; the others are the papers' ablation.
    inputs: str = "feature_token"


@dataclass
class LossConfig:
    """Smooth-L1 on features plus cross-entropy on the target's distribution."""

    l1_weight: float = 1.0  # weight of the Smooth-L1 term
    ce_weight: float = 0.1  # weight of the cross-entropy term
    # HASS's term: the cross-entropy's summands at the target's K most likely tokens, once more
    top_k: int = 0  # K, 10 in the paper; 0: without it
    top_k_weight: float = 1.0  # weight of that term
    vocab: int | None = None  # cross-entropy over the N most frequent tokens only; null: all
    chunk_rows: int | None = None  # positions per output head product; null: 512 CPU, 2048 GPU
    fuse: bool = False  # compile the passes over the vocabulary (needs a C++ compiler, or Triton)


@dataclass
class HeldoutConfig:
    """Conversations kept out of training, on which acceptance is estimated."""

    share: float = 0.05  # of the conversations, chosen by a hash of their id
    max_tokens: int | None = 20000  # use at most this many tokens of them per estimate
    num_steps: int = 3  # length of the greedy draft chain, K


@dataclass
class TrainConfig:
    """A feature cache in, checkpoints of a draft head out."""

    features: str = MISSING  # folder of the feature cache
    out: str = MISSING  # folder of the run
    # The target's matrices are read from here; an empty path: where the cache says.
    target: TargetConfig = field(default_factory=lambda: TargetConfig(path=""))
    head: HeadConfig = field(default_factory=HeadConfig)
    # Start from this head: a run, a checkpoint, an export, or a published head's folder or hub id.
    init_from: str | None = None
    init_drop_bias: bool = False  # start without the fc.bias that a published head may have
    loss: LossConfig = field(default_factory=LossConfig)
    heldout: HeldoutConfig = field(default_factory=HeldoutConfig)
    epochs: int = 10  # passes over the cache
    max_steps: int | None = None  # end after this many optimizer steps instead
    batch_tokens: int = 8192  # tokens of one optimizer step, over all processes
    micro_batch_tokens: int = 8192  # most tokens of one forward on one process
    lr: float = 3e-5  # peak learning rate
    warmup: float = 0.02  # share of the run (below 1), or optimizer steps (1 and above)
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW
    weight_decay: float = 0.0  # AdamW
    max_grad_norm: float = 0.5  # gradients are clipped to this norm
    noise: str = "paper"  # on input features: paper U(-w, w), reference (x 512/T), none
    noise_width: float = 0.1  # w, in units of the feature
    unroll: int = 1  # steps that each position is drafted ahead, on the head's own features (HASS)
    seed: int = 0
    save_every: int | None = None  # steps between checkpoints and estimates; null: a tenth
    # Stop after this many estimates in a row that do not beat the best; null: train to the end. The
    # learning rate is planned for the whole run: one that stops early has not decayed.
    patience: int | None = None
    keep: int = 2  # newest checkpoints kept, besides the best
    log_every: int = 10  # optimizer steps between lines
    tracker: str | None = None  # wandb or tensorboard, beside metrics.jsonl

    def __post_init__(self) -> None:
        one_of("noise", self.noise, NOISES)
        one_of("head.init", self.head.init, INITS)
        one_of("head.inputs", self.head.inputs, INPUTS)
        if self.loss.top_k < 0 or self.loss.top_k > (self.loss.vocab or self.loss.top_k):
            raise ValueError(
                f"loss.top_k is {self.loss.top_k}, expected 0 (without that term) up to loss.vocab "
                f"({self.loss.vocab or 'the whole vocabulary'})."
            )
        if self.unroll < 1:
            raise ValueError(f"unroll is {self.unroll}, but must be at least 1 (no unrolling).")
        if self.init_from and self.head.init != "random":
            raise ValueError(
                f"init_from={self.init_from} gives the start values, so head.init={self.head.init} "
                "cannot. Leave one of them out (head.init=random where a recipe sets it)."
            )
        one_of("tracker", self.tracker, (None, *TRACKERS))
        for name in ("patience", "save_every", "keep", "log_every"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} is {value}, but must be at least 1.")
        if self.patience and self.heldout.share == 0:
            raise ValueError(
                f"patience={self.patience} waits for estimates, but heldout.share=0 makes none. "
                "Leave one of them out."
            )


@dataclass
class CompareConfig:
    """Runs in, a table and a picture of them side by side out."""

    runs: Any = MISSING  # a run, a folder of runs, or a list of these
    out: str | None = None  # folder of compare.png and compare.json; null: the first of `runs`


@dataclass
class TokenMapConfig:
    """A feature cache in, the tokens that SGLang's draft may use out (FR-Spec)."""

    features: str = MISSING  # folder of the feature cache: the replies that are counted
    size: int = MISSING  # tokens of the map
    out: str = MISSING  # file, for --speculative-token-map; its record is written beside it
    # Measure what the map costs this head: a run, a checkpoint, an export, or a published head.
    head: str | None = None
    # The tokenizer and the output head are read from here; an empty path: where the cache says.
    target: TargetConfig = field(default_factory=lambda: TargetConfig(path=""))
    # Conversations that are not counted, but measured. As in training: the same are held out.
    heldout: HeldoutConfig = field(default_factory=HeldoutConfig)
    seed: int = 0  # of the training run

    def __post_init__(self) -> None:
        if isinstance(self.size, int) and self.size < 1:
            raise ValueError(f"size is {self.size}, but must be at least 1.")
        if not 0 < self.heldout.share < 1:
            raise ValueError(
                f"heldout.share is {self.heldout.share}, expected a number between 0 and 1: the "
                "map is measured on conversations that it was not made from."
            )


@dataclass
class ExportConfig:
    """A checkpoint in, a folder that a serving engine loads out."""

    # A run (its best checkpoint), one checkpoint, or another head's folder or hub id: an export, or
    # a published head (then target= says whose it is).
    checkpoint: str = MISSING
    engine: str = "vllm"  # vllm, sglang, or eagle: the layout of the EAGLE repository
    out: str | None = None  # null: RUN/export/ENGINE
    push_to_hub: str | None = None  # upload the folder to this hub id too (ORG/NAME)
    private: bool = True  # whether the hub repository is made private
    # An empty path: where the checkpoint says.
    target: TargetConfig = field(default_factory=lambda: TargetConfig(path=""))

    def __post_init__(self) -> None:
        one_of("engine", self.engine, ENGINES)


@dataclass
class DecodeConfig:
    """How prompts are answered when a head is measured."""

    # A file, a folder of such files, a list of these, or {name: file}; the forms that are known
    # are in data/chats/prompt_sets.py.
    prompts: Any = MISSING
    limit: int | None = None  # use only the first N prompts of each set
    max_new_tokens: int = 128  # tokens of one answer
    num_steps: int = 3  # draft tokens per round (chain), or depth of the tree, K
    max_prompt_tokens: int = 1024  # longer prompts are left out, and counted


@dataclass
class EvaluateConfig(DecodeConfig):
    """An exported head and its target in, acceptance and speed out."""

    head: str = MISSING  # exported folder
    target: TargetConfig = MISSING
    out: str | None = None  # folder of the report; null: HEAD/evaluation
    restart: bool = False  # answer all prompts anew, where `out` holds answers already
    # chain, static (EAGLE-1), dynamic (EAGLE-2), or auto: the fastest by measured acceptance and
    # measured forwards of this machine
    tree: str = "chain"
    topk: int | None = None  # children of a node; null: 1 for a chain, 4 for a tree
    num_draft_tokens: int | None = None  # nodes with the root; null: num_steps+1, 8 for a tree
    tree_prompts: int = 8  # prompts answered first, to shape a static tree or to choose one (auto)
    batch_size: int = 1  # prompts answered at once
    temperature: float = 0.0  # 0: greedy, and answers are compared with plain decoding
    top_p: float = 1.0  # sample from the most likely tokens that make up this probability
    top_k: int = 0  # sample from this many most likely tokens; 0: all
    seed: int = 0  # of sampling
    # prompt_lookup (drafts are copied from the prompt) and assistant (a smaller model drafts), both
    # as Transformers has them: what a head is worth against what needs no training
    baselines: list[str] = field(default_factory=list)
    assistant: str | None = None  # the smaller model: hub id or folder

    def __post_init__(self) -> None:
        one_of("tree", self.tree, TREES)
        for name in self.baselines:
            one_of("baselines", name, BASELINES)
        if ("assistant" in self.baselines) != bool(self.assistant):
            raise ValueError(
                f"baselines is {self.baselines} and assistant is {self.assistant}. Give both "
                "baselines=[assistant] and assistant=MODEL, or neither."
            )
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}, but must be 0 or more.")
        if self.baselines and self.temperature > 0:
            raise ValueError(
                f"baselines={self.baselines} are measured greedily: their answers are compared. "
                f"Leave them out, or temperature={self.temperature}."
            )
        if self.baselines and self.batch_size > 1:
            raise ValueError(
                f"baselines={self.baselines} answer one prompt at a time, as in Transformers. "
                f"Leave them out, or batch_size={self.batch_size}."
            )
        for name in ("num_steps", "batch_size", "tree_prompts", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1.")
        shape = (self.topk, self.num_draft_tokens)
        if self.tree in ("chain", "auto") and shape != (None, None):
            raise ValueError(
                f"topk={self.topk} and num_draft_tokens={self.num_draft_tokens} are of a tree, but "
                f"tree={self.tree}. Leave them out, or choose tree=static or tree=dynamic."
            )


@dataclass
class ChatConfig:
    """A head, its target and a person at a terminal."""

    head: str = MISSING  # exported folder
    target: TargetConfig = MISSING
    prompt: str | None = None  # answer this and end; null: read from the terminal
    system: str | None = None  # system prompt
    max_new_tokens: int = 512  # tokens of one answer
    tree: str = "dynamic"  # chain, static or dynamic
    num_steps: int = 4  # draft tokens per round (chain), or depth of the tree
    topk: int | None = None  # children of a node; null: 1 for a chain, 4 for a tree
    num_draft_tokens: int | None = None  # nodes with the root; null: num_steps+1, 8 for a tree
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0  # sample from the most likely tokens that make up this probability
    top_k: int = 0  # sample from this many most likely tokens; 0: all
    seed: int = 0  # of sampling
    color: str = "auto"  # auto (a terminal without NO_COLOR), always or never

    def __post_init__(self) -> None:
        one_of("tree", self.tree, TREES[:3])
        one_of("color", self.color, COLORS)


@dataclass
class CheckConfig(DecodeConfig):
    """A head's folder and its target: looked at (path=), or decoded by a real engine (head=)."""

    path: str | None = None  # any head, ours or published, folder or hub id: needs no engine
    head: str | None = None  # exported folder, decoded in the engine and by us
    target: TargetConfig = MISSING
    engine: str | None = None  # vllm or sglang; null: path= both, head= the one it was exported for
    prompts: Any = None  # with head=: as for evaluate_head
    num_steps: Any = 3  # draft tokens per round, or a list of several numbers to check
    # Folder of the report (null: HEAD/check); with fix=true the new folder.
    out: str | None = None
    # With path=: repair what can be repaired, for `engine` (null: vllm), into `out`.
    fix: bool = False
    run_target: bool = True  # run the target on a few prompts, to see whether the head predicts it
    server: bool = False  # with head=: ask the engine as an OpenAI-compatible server too
    topk: int = 1  # engine=sglang: children of a node; above 1 the drafts are trees
    num_draft_tokens: int | None = None  # engine=sglang: nodes with the root; null: num_steps+1
    sglang_python: str | None = None  # the Python that has SGLang; null: that of .venv-sglang

    def __post_init__(self) -> None:
        one_of("engine", self.engine, (None, "vllm", "sglang"))
        if bool(self.path) == bool(self.head):
            raise ValueError(
                f"path is {self.path} and head is {self.head}. Give path=FOLDER to look at a "
                "folder without an engine, or head=FOLDER to decode with it in one."
            )
        if self.head and self.engine != "sglang" and not self.prompts:
            raise ValueError(
                "head=FOLDER needs prompts to decode (prompts=FILE); with engine=sglang it may be "
                "loaded only."
            )
        if self.fix and not (self.path and self.out):
            raise ValueError("fix=true repairs path=FOLDER into a new folder: say which (out=NEW).")
        steps = self.num_steps if isinstance(self.num_steps, list) else [self.num_steps]
        if not steps or not all(isinstance(n, int) and n > 0 for n in steps):
            raise ValueError(
                f"num_steps is {self.num_steps}, expected a whole number above 0, or a list of them"
            )


@dataclass
class SimulateConfig:
    """Acceptance rates in, the acceptance length by formula and by simulation out."""

    alphas: list[float] = MISSING  # α_n of draft token n, given that those before were accepted
    rounds: int = 50_000  # rounds that are played
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.alphas or not all(0 <= alpha <= 1 for alpha in self.alphas):
            raise ValueError(f"alphas is {self.alphas}, expected one or more shares from 0 to 1.")
        if self.rounds < 1:
            raise ValueError(f"rounds is {self.rounds}, but must be at least 1.")
