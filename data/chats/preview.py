"""Shows what a dump would store of some chats: their token sequences, and figures of all."""

import os
import random
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import torch
from tqdm import tqdm

from data.chats.conversations import Conversation, Counts, read_conversations
from data.chats.plausible import FEWEST_SEQUENCES, implausible
from data.chats.rendering import BATCH, TokenSequence, render_all
from data.chats.split import with_suffix
from data.chats.statistics import PIECE, Statistics, measure, percent, table
from data.chats.stretches import (
    LEGEND,
    LINE_END,
    Stretch,
    as_html,
    as_text,
    legend,
    printable,
    shorten,
    stretches,
)
from data.chats.template import control_tokens
from data.chats.tokens import Tokens
from data.config import PreviewConfig
from data.files import atomic_write
from data.targets.families import load_tokenizer


@dataclass(frozen=True)
class Shown:
    """One sequence, to be looked at; without text if its chat was dropped."""

    id: str
    title: str
    stretches: list[Stretch]


def preview(config: PreviewConfig, *, color: bool) -> str:
    """Some sequences and the figures of all, for the terminal; as a page too, if asked for.

    Raises ValueError for ids that there are not, and if nothing is supervised.
    """
    tokenizer, counts = load_tokenizer(config.target), Counts()
    if config.ids:
        shown, figures = _by_id(tokenizer, config, counts), ""
    else:
        shown, statistics = _sample(tokenizer, config, counts)
        figures = f"{counts.summary()}\n\n{table(statistics)}\n\n{_verdict(statistics)}"
    blocks = []
    for one in shown:
        body = as_text(shorten(one.stretches, config.max_chars), color=color)
        blocks.append(f"{_bold(one.title) if color else one.title}\n{body}".rstrip("\n"))
    if blocks:
        blocks.insert(0, legend(color=color))
    if figures:
        blocks.append(figures)
    if config.html is not None:
        file = Path(config.html).expanduser()
        _write_page(file, config, shown, figures)
        blocks.append(f"written to {file}")
    return "\n\n".join(blocks)


def wants_color(choice: str, stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `stream` gets colours. auto: if it is a terminal that has them, without NO_COLOR."""
    if choice != "auto":
        return choice == "always"
    is_able = stream.isatty() and environment.get("TERM") != "dumb"
    return is_able and not environment.get("NO_COLOR")


# --- which sequences ---------------------------------------------------------------------------


def _sample(
    tokenizer: Any, config: PreviewConfig, counts: Counts
) -> tuple[list[Shown], Statistics]:
    """A draw from all sequences, in the order of the data set, and the statistics of all."""
    kept: dict[int, tuple[int, str, Conversation]] = {}
    sequences = _keeping(_all(tokenizer, config, counts), kept, size=config.show, seed=config.seed)
    statistics = measure(
        _pieces(sequences),
        max_length=config.max_length,
        end_tokens=control_tokens(tokenizer),
        spell=tokenizer.decode,
    )
    shown = []
    for _, name, conversation in sorted(kept.values(), key=lambda item: item[0]):
        shown += _look(tokenizer, conversation, max_length=config.max_length, only=[name])
    return shown, statistics


def _all(
    tokenizer: Any, config: PreviewConfig, counts: Counts
) -> Iterator[tuple[TokenSequence, list[Conversation]]]:
    """Every sequence that a dump would store, and a few conversations of which one is its own."""
    conversations = iter(_read(config, counts))
    is_empty = True
    while batch := list(islice(conversations, BATCH)):
        for sequence in render_all(tokenizer, batch, max_length=config.max_length, counts=counts):
            is_empty = False
            yield sequence, batch
    if is_empty:
        raise ValueError(
            f"No supervised token in {config.dataset.path} (max_length {config.max_length}): "
            f"no conversation has two tokens of one reply to learn from.\n{counts.summary()}"
        )


def _keeping(
    sequences: Iterable[tuple[TokenSequence, list[Conversation]]],
    kept: dict[int, tuple[int, str, Conversation]],
    *,
    size: int,
    seed: int,
) -> Iterator[TokenSequence]:
    """Hand all sequences on, and keep number, id and conversation of a uniform draw of `size`."""
    rng = random.Random(seed)
    for number, (sequence, batch) in enumerate(sequences):
        place = number if number < size else rng.randrange(number + 1)
        if place < size:
            conversation = next(c for c in batch if _is_of(sequence.id, c))
            kept[place] = number, sequence.id, conversation
        yield sequence


def _pieces(sequences: Iterable[TokenSequence]) -> Iterator[Tokens]:
    """Sequences joined to pieces of about PIECE tokens."""
    ids, mask, lengths = array("i"), bytearray(), array("q")
    for sequence in sequences:
        ids.extend(sequence.input_ids)
        mask.extend(sequence.loss_mask)
        lengths.append(len(sequence.input_ids))
        if len(ids) >= PIECE:
            yield _joined(ids, mask, lengths)
            ids, mask, lengths = array("i"), bytearray(), array("q")
    if ids:
        yield _joined(ids, mask, lengths)


def _joined(ids: array, mask: bytearray, lengths: array) -> Tokens:
    return Tokens(
        torch.frombuffer(ids, dtype=torch.int32),
        torch.frombuffer(mask, dtype=torch.bool),
        torch.tensor([0, *lengths]).cumsum(0),
    )


def _by_id(tokenizer: Any, config: PreviewConfig, counts: Counts) -> list[Shown]:
    """The chats, or single sequences of them, that are asked for; the rest is not rendered."""
    wanted = set(config.ids)
    shown: list[Shown] = []
    for conversation in _read(config, counts):
        if mine := {name for name in wanted if _is_of(name, conversation)}:
            only = None if conversation.id in mine else mine
            found = _look(tokenizer, conversation, max_length=config.max_length, only=only)
            shown += found
            wanted -= {conversation.id, *(one.id for one in found)}
        if not wanted:
            return shown
    raise ValueError(
        f"There is no usable chat {', '.join(map(repr, sorted(wanted)))} in {config.dataset.path}. "
        "An id of digits must be given in quotes: ids=[\"'7_1'\"].\n" + counts.summary()
    )


def _read(config: PreviewConfig, counts: Counts) -> Iterable[Conversation]:
    return tqdm(read_conversations(config.dataset, counts), desc="read", unit=" chats", delay=1)


def _is_of(sequence_id: str, conversation: Conversation) -> bool:
    """Whether a sequence is of this chat, or of one of its replies."""
    first = with_suffix(conversation.id, "reply")
    return sequence_id == conversation.id or sequence_id.startswith(first)


def _look(
    tokenizer: Any,
    conversation: Conversation,
    *,
    max_length: int,
    only: Collection[str] | None = None,
) -> list[Shown]:
    """The sequences of a conversation (`only` those with these ids) as they are to be shown."""
    counts = Counts()
    sequences = list(render_all(tokenizer, [conversation], max_length=max_length, counts=counts))
    if not sequences:
        title = f"{printable(conversation.id)}: dropped, {', '.join(counts.dropped)}"
        return [Shown(conversation.id, title, [])]
    return [
        Shown(s.id, _title(s, counts, max_length), stretches(tokenizer, s, conversation))
        for s in sequences
        if only is None or s.id in only
    ]


def _title(sequence: TokenSequence, counts: Counts, max_length: int) -> str:
    length, supervised = len(sequence.input_ids), sum(sequence.loss_mask)
    notes = [note for note in counts.mended if note != "cut to max_length" or length == max_length]
    figures = f"{length:,} tokens, {supervised:,} supervised ({percent(supervised / length)})"
    return f"{printable(sequence.id)}: " + "; ".join([figures, *notes])


# --- what is written ---------------------------------------------------------------------------


def _verdict(statistics: Statistics) -> str:
    if statistics.sequences < FEWEST_SEQUENCES:
        return f"Too few to judge: a dump checks these figures from {FEWEST_SEQUENCES} sequences."
    faults = list(implausible(statistics))
    if not faults:
        return "Nothing looks wrong: a dump would take these chats."
    lines = "\n".join(f"  - {fault}" for fault in faults)
    return f"A dump would refuse these chats, unless dataset.allow_implausible=true:\n{lines}"


def _bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m"


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; }}
body {{ padding: 0 1rem; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
h2 {{ font-size: 1rem; border-top: 1px solid #8888; padding-top: 1rem; }}
.supervised {{ background: #b7ebc0; }}
@media (prefers-color-scheme: dark) {{ .supervised {{ background: #1d5c2b; }} }}
.frame {{ opacity: .55; }}
.control {{ text-decoration: underline; }}
</style>
<h1>{title}</h1>
<p>{legend}, <span class="control">control token</span>, {line_end}</p>
{sequences}
<pre>{figures}</pre>
</html>
"""


def _write_page(file: Path, config: PreviewConfig, shown: list[Shown], figures: str) -> None:
    keys = [f'<span class="{kind}">{escape(text)}</span>' for kind, text in LEGEND.items()]
    blocks = [f"<h2>{escape(one.title)}</h2>\n<pre>{as_html(one.stretches)}</pre>" for one in shown]
    page = PAGE.format(
        title=escape(f"{config.dataset.path}, as {config.target.path} reads it"),
        legend=", ".join(keys),
        line_end=LINE_END,
        sequences="\n".join(blocks),
        figures=escape(figures),
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as tmp:
        tmp.write_text(page, encoding="utf-8")
