"""The tokens that SGLang's draft may use: `--speculative-token-map` (FR-Spec, arXiv 2502.14856).

Most of a draft step is the output head, and few tokens make most of a text. With a map SGLang
gathers those rows of the target's output head and drafts among them only. The head stays the same,
and so does the output: the target still says what it says, and a token outside the map is merely
never guessed. So a map trades acceptance for cheaper drafts; what it costs is measured here.
"""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig

from data.cache.reader import FeatureCache
from data.config import TargetConfig, or_known
from data.files import atomic_write, write_json, writing
from data.replies.rules import end_token
from data.targets.checkpoint_files import locate
from data.targets.model import (
    TargetHead,
    load_config,
    load_tokenizer,
    read_target_head,
    target_device,
)
from train.acceptance import HeldoutEstimate, chain_acceptance
from train.config import TokenMapConfig
from train.fit.plan import split_cache
from train.fit.setup import heldout_in, refuse_another_target
from train.fit.vocabulary import reply_token_counts
from train.serve.import_head import load_head_folder

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
SMALL_CACHE = 0.03  # between the two shares; with enough text they are nearly the same
OTHER_SIZES = (1024, 2048, 4096, 8192, 16384, 32768, 65536)  # shown beside the one asked for


@dataclass(frozen=True, kw_only=True)
class Row:
    """One size of a map."""

    size: int
    training: float  # share of the replies' tokens that are in the map, where they were counted
    heldout: float  # and in conversations that were not
    estimate: HeldoutEstimate | None  # acceptance with this map, if a head was given

    def to_json(self) -> dict[str, Any]:
        shares = {"size": self.size, "training": self.training, "heldout": self.heldout}
        return shares | ({"acceptance": self.estimate.to_json()} if self.estimate else {})


def build_token_map(config: TokenMapConfig) -> list[int]:
    """Write the map and its record OUT.json, print what it covers and costs, and return it.

    The map is a list of ints as torch.save writes it: the `size` tokens most frequent in the
    replies of the conversations that training uses, always with the tokens that end a reply.

    Raises ValueError for a size that is larger than the vocabulary or too small for the ends of a
    reply, and for a cache, target and head that do not belong together.
    """
    cache = FeatureCache(Path(config.features))
    training, heldout = split_cache(cache, config)
    target = or_known(config.target, cache.fingerprint)
    refuse_another_target(target, cache)
    target_head = read_target_head(target)
    vocab_size = len(target_head.weight)
    ends = reply_ends(target)
    check_size(config.size, vocab_size=vocab_size, ends=ends)

    counts = reply_token_counts(cache, training, vocab_size=vocab_size)
    unseen = reply_token_counts(cache, heldout, vocab_size=vocab_size)
    sizes = sorted({n for n in OTHER_SIZES if len(ends) <= n < vocab_size} | {config.size})
    maps = {size: most_frequent(counts, size, always=ends) for size in [*sizes, vocab_size]}
    estimates = {}
    if config.head:
        estimates = _estimates(config, target, target_head, cache, heldout, maps)
    rows = [
        Row(
            size=size,
            training=share(counts, chosen),
            heldout=share(unseen, chosen),
            estimate=estimates.get(size),
        )
        for size, chosen in maps.items()
    ]
    chosen = maps[config.size].tolist()
    out = Path(config.out)
    record = {
        "format_version": FORMAT_VERSION,
        "fingerprint": cache.fingerprint,
        "settings": asdict(config),
        "always": ends,
        "sizes": [row.to_json() for row in rows],
    }
    _write(out, chosen, record)
    _show(config, rows, counts=counts, ends=load_tokenizer(target).convert_ids_to_tokens(ends))
    return chosen


def reply_ends(target: TargetConfig) -> list[int]:
    """The tokens at which the target stops, and the one with which its template ends a reply.

    Without them no draft could ever guess that a reply is over.
    """
    tokenizer, location = load_tokenizer(target), locate(target)
    ends = {tokenizer.eos_token_id, end_token(tokenizer)}
    configs: list[Any] = [load_config(target).get_text_config()]
    if (Path(location.path) / "generation_config.json").is_file():
        configs.append(GenerationConfig.from_pretrained(location.path))
    for loaded in configs:
        eos = getattr(loaded, "eos_token_id", None)
        ends.update(eos if isinstance(eos, list) else [eos])
    return sorted(ends - {None})


def most_frequent(counts: Tensor, size: int, *, always: list[int]) -> Tensor:
    """The `size` most frequent tokens, `always` first: [V] -> [size] token ids.

    Ties go to the smaller id, so that two machines make the same map. Tokens that never occurred
    come last; the smallest ids of a BPE vocabulary are its bytes and its first, frequent merges.
    """
    ranked = counts.clone()
    ranked[always] = counts.max() + 1
    return ranked.argsort(descending=True, stable=True)[:size]


def share(counts: Tensor, chosen: Tensor) -> float:
    """Which part of all counted tokens are chosen ones."""
    return float(counts[chosen].sum() / counts.sum().clamp(min=1))


def check_size(size: int, *, vocab_size: int, ends: list[int]) -> None:
    """Raise ValueError for a map that cannot be, or would be of no use."""
    if size > vocab_size:
        raise ValueError(
            f"size is {size}, but the target has {vocab_size} tokens. Give fewer; a map of all of "
            "them would gain nothing."
        )
    if size < len(ends):
        raise ValueError(
            f"size is {size}, but the map always holds the {len(ends)} tokens that end a reply "
            f"({ends}). Give more: published maps have 8,192 to 32,768."
        )


def _estimates(
    config: TokenMapConfig,
    target: TargetConfig,
    target_head: TargetHead,
    cache: FeatureCache,
    heldout: list[int],
    maps: dict[int, Tensor],
) -> dict[int, HeldoutEstimate]:
    """Held-out acceptance of greedy chains with each map."""
    assert config.head
    head, record = load_head_folder(config.head, target)
    known = record["fingerprint"]["weights"]
    if known != cache.fingerprint["weights"]:
        raise ValueError(
            f"{config.head} was trained for another target (weights {known}) than the cache is of "
            f"({cache.fingerprint['weights']}). Give the head that was trained on it."
        )
    device = target_device(target)
    head, target_head = head.to(device), target_head.to(device)
    batches = heldout_in(cache, target_head, heldout, device=device)
    estimates = {}
    for size, chosen in tqdm(maps.items(), desc="acceptance", unit="map"):
        banned = torch.ones(len(target_head.weight), dtype=torch.bool, device=device)
        banned[chosen.to(device)] = False
        estimates[size] = chain_acceptance(
            head, target_head, batches, num_steps=config.heldout.num_steps, banned=banned
        )
    return estimates


def _write(out: Path, chosen: list[int], record: dict[str, Any]) -> None:
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(out) as tmp:
            torch.save(chosen, tmp)
        write_json(record_path(out), record)


def record_path(out: Path) -> Path:
    return out.with_name(f"{out.name}.json")


def _show(config: TokenMapConfig, rows: list[Row], *, counts: Tensor, ends: list[str]) -> None:
    seen = int((counts > 0).sum())
    log.info(
        "counted     %s reply tokens of training conversations, %s different ones",
        f"{int(counts.sum()):,}",
        f"{seen:,}",
    )
    log.info("always      %s: they end a reply", ", ".join(ends))
    header = f"{'size':>10}{'vocabulary':>12}{'training':>11}{'held-out':>11}"
    log.info("\n%s%s", header, "   τ of a chain" if config.head else "")
    for row in rows:
        mark = ">" if row.size == config.size else " "
        line = f"{mark}{row.size:>9,}{row.size / rows[-1].size:>12.1%}"
        line += f"{row.training:>11.2%}{row.heldout:>11.2%}"
        log.info("%s%s", line, f"   {row.estimate}" if row.estimate else "")
    log.info("\ntraining, held-out: share of the replies' tokens that such a map can draft")
    asked = next(row for row in rows if row.size == config.size)
    if asked.training - asked.heldout > SMALL_CACHE:
        log.warning(
            "warning: the held-out share is much lower: this cache is too small to know the %s "
            "most frequent tokens. Count more chats, or take a larger map.",
            f"{config.size:,}",
        )
    if config.size > seen:
        log.info("%s of the map's tokens never occurred here", f"{config.size - seen:,}")
    if not config.head:
        log.info("what a map costs in acceptance is measured with head=FOLDER")
    log.info("wrote       %s, %s", config.out, record_path(Path(config.out)))
    log.info("serve with  --speculative-token-map %s", config.out)
