"""Every way known to us in which a head's folder goes wrong in an engine, and what then happens.

Most of them are silent: engines fill what is missing, drop what they do not know, and verification
hides the damage, so that only fewer draft tokens are accepted. The effects are those of vLLM 0.32
and SGLang 0.5.23, nearly all of them seen by running the engines.
"""

from dataclasses import dataclass

OTHER = "loads as a different network"
REFUSED = "is refused"
NOTE = "loads"  # as it is meant: said only to be known
VERDICTS = (REFUSED, OTHER, NOTE)  # worst first

ENGINES = ("vllm", "sglang")
Effect = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What each engine does; None: it does not matter there."""

    vllm: Effect | None = None
    sglang: Effect | None = None
    repair: str | None = None  # what `fix=true` does about it

    def effect(self, engine: str) -> Effect | None:
        return self.vllm if engine == "vllm" else self.sglang


def _both(verdict: str, text: str, repair: str | None = None) -> Rule:
    return Rule(vllm=(verdict, text), sglang=(verdict, text), repair=repair)


UNFILLED = "silently left as uninitialised memory; next to nothing is accepted"
FROM_CONFIG = "written as the target's config has it"

RULES = {
    # Files
    "no-weights": _both(REFUSED, "there is no weights file"),
    "missing-shard": _both(REFUSED, "the index names a file that is not there"),
    "second-file": _both(
        OTHER, "every weights file is read, the later one silently wins", "one file is written"
    ),
    "altered-weights": _both(OTHER, "the tensors are not those that were exported and measured"),
    # Names of tensors
    "prefix": Rule(
        vllm=(REFUSED, "ValueError: There is no module or parameter named 'model'"),
        sglang=(OTHER, "only warnings; nothing is loaded and nothing is accepted"),
        repair="the prefix is taken off",
    ),
    "layer-name": Rule(
        vllm=(REFUSED, "ValueError: There is no module or parameter of that name"),
        sglang=(OTHER, "a warning; the layer keeps uninitialised memory"),
        repair="the layer is called layers.0",
    ),
    "extra-layer": Rule(
        vllm=(REFUSED, "ValueError: There is no module or parameter named layers.1"),
        sglang=(OTHER, "a warning; only layer 0 is used"),
    ),
    "missing-fc": Rule(
        vllm=(OTHER, UNFILLED), sglang=(OTHER, "silently random: nothing is accepted")
    ),
    "missing-attention": _both(OTHER, UNFILLED),
    "missing-mlp": _both(OTHER, UNFILLED),
    "missing-norm": _both(OTHER, "silently all ones"),
    "fc-bias-missing": Rule(
        sglang=(OTHER, "its fc always has a bias, and a missing one is silently random"),
        repair="a bias of zeros is written",
    ),
    "fc-bias-zero": Rule(
        vllm=(NOTE, "silently dropped, which is right for zeros"), repair="it is left out"
    ),
    "fc-bias-used": Rule(
        vllm=(OTHER, "its fc has no bias: silently dropped, and no other weight can replace it")
    ),
    "qkv-bias": Rule(
        vllm=(OTHER, 'silently dropped without "qkv_bias": true'),
        sglang=(OTHER, "silently dropped unless the class is Qwen2ForCausalLMEagle"),
        repair="left out where it is zero",
    ),
    "unknown-bias": _both(OTHER, "silently dropped", "left out where it is zero"),
    "own-embedding": Rule(
        vllm=(OTHER, "silently used in place of the target's"),
        sglang=(NOTE, "loaded, then replaced by the target's; the head was trained with others"),
    ),
    "embedding-copy": _both(NOTE, "equal to the target's, which is used", "the copy is left out"),
    "embedding-shape": _both(REFUSED, "it has not one row of hidden_size for each token"),
    "output-head": Rule(
        vllm=(REFUSED, "ValueError: There is no module or parameter named 'lm_head'"),
        sglang=(NOTE, "never looked at: the target's is used"),
        repair="left out where it equals the target's",
    ),
    "extra-norm": Rule(
        vllm=(REFUSED, "ValueError: There is no module or parameter of that name"),
        sglang=(OTHER, "a warning, then ignored: an `eagle` head has no such norm"),
    ),
    "eagle3": Rule(
        vllm=(REFUSED, "ValueError: There is no module or parameter of that name"),
        sglang=(OTHER, "warnings; it is an EAGLE-3 head, which is served as method EAGLE3"),
    ),
    "rope-buffer": _both(NOTE, "skipped: the angles follow from config.json", "it is left out"),
    "unknown-tensor": Rule(
        vllm=(REFUSED, "ValueError: There is no module or parameter of that name"),
        sglang=(OTHER, "at most a warning, then ignored"),
    ),
    # Shapes and values
    "truncated": _both(
        OTHER, "silently cut down to what config.json says", "config.json follows the tensors"
    ),
    "padded": Rule(
        vllm=(REFUSED, "the tensor does not fill the parameter"),
        sglang=(OTHER, "silently filled up with zeros on a CPU; q, k and v refused on a GPU"),
        repair="config.json follows the tensors",
    ),
    "wrong-shape": _both(REFUSED, "AssertionError or RuntimeError about the tensor's shape"),
    "not-finite": _both(OTHER, "loads silently and accepts nothing"),
    "weights-dtype": _both(
        NOTE, "converted silently to what config.json or the target says", "converted once"
    ),
    "fc-halves": _both(
        OTHER, "silent: embedding and feature are taken for one another", "the halves are swapped"
    ),
    "rope-guess": _both(
        OTHER, "with the target's RoPE it predicts more", "the target's RoPE is written"
    ),
    "predicts-nothing": _both(OTHER, "of another target, or another network: nothing is accepted"),
    # config.json
    "model-type": _both(REFUSED, "an `eagle` head is read as a llama config", 'written: "llama"'),
    "architecture-absent": Rule(
        vllm=(REFUSED, "no architectures in config.json"),
        sglang=(REFUSED, "TypeError: 'NoneType' object is not iterable"),
        repair="the engine's name is written",
    ),
    "architecture-unknown": Rule(
        vllm=(REFUSED, "Model architectures are not supported"),
        sglang=(REFUSED, "ValueError: Model architectures are not supported"),
        repair="the engine's name is written",
    ),
    "architecture-class": _both(
        OTHER, "the engine builds another head class of that name", "the engine's name is written"
    ),
    "architecture-plain": Rule(
        sglang=(OTHER, "a plain one-layer model; only warnings, nothing is accepted"),
        repair="the engine's name is written",
    ),
    "layer-count": _both(
        OTHER, "silently that many layers (32 if not said), uninitialised", "written: 1"
    ),
    "hidden-size": Rule(
        vllm=(REFUSED, "the target's features do not fit the head's fc"),
        sglang=(REFUSED, "RuntimeError in the first forward: shapes cannot be multiplied"),
        repair="config.json follows the tensors",
    ),
    "vocab-size": _both(
        OTHER, "silent: token ids from there on are never drafted", "the target's is written"
    ),
    "rope-missing": _both(OTHER, "silently theta 10000 without scaling", FROM_CONFIG),
    "rope-other": _both(NOTE, "right only if it was trained so"),
    "epsilon-missing": _both(OTHER, "silently 1e-6", FROM_CONFIG),
    "epsilon-other": _both(NOTE, "right only if it was trained so"),
    "positions": Rule(
        vllm=(OTHER, "drafting silently stops for a batch in which one sequence is longer"),
        sglang=(REFUSED, "ValueError: the head's context is shorter than the target's"),
        repair=FROM_CONFIG,
    ),
    "bias-keys": Rule(
        vllm=(OTHER, "the layer gets biases that no tensor fills: NaN, nothing is accepted"),
        sglang=(NOTE, "the biases it adds are zeros"),
        repair="written: false",
    ),
    "tied-flag": Rule(
        sglang=(
            REFUSED,
            "AttributeError: 'VocabParallelEmbedding' object has no attribute 'weight'",
        ),
        repair="written: false",
    ),
    "dtype": Rule(
        sglang=(
            REFUSED,
            "RuntimeError in the first forward: mat1 and mat2 must have the same dtype",
        ),
        repair="the target's is written",
    ),
    "dtype-float32": Rule(
        sglang=(NOTE, "engines take float16 for float32 unless served with --dtype float32")
    ),
    "activation": _both(REFUSED, "ValueError: Only silu is supported", None),
    "head-dim": _both(OTHER, "not said, and hidden_size / heads is another", FROM_CONFIG),
    "soft-cap": Rule(
        sglang=(OTHER, "its confidences are not capped as the target's are"), repair=FROM_CONFIG
    ),
    "target-window": Rule(
        vllm=(NOTE, "the head attends within that window too, silently; it was trained without one")
    ),
    "target-family": _both(REFUSED, "this engine has no `eagle` drafting for such targets"),
}
