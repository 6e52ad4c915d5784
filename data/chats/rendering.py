"""Conversations to token ids, and the mask of what the assistant wrote.

The text is one rendering with the target's own chat template, tokenised at once, as a server does
it. A reply is supervised from where the server's prompt ends to its end-of-turn token, by the
characters that the tokens stand for. Two effects of tokenising at once are undone: a token that
reaches from the prompt into the reply is cut in two there, and a control token that is written out
in a turn stays the text that it is.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

from data.chats.conversations import Conversation, Counts, Turn
from data.chats.template import (
    ChatText,
    Span,
    chat_texts,
    control_tokens,
    encode,
    fold_system,
    takes_system,
)

BATCH = 64  # conversations tokenised in one call
CHARS_PER_TOKEN = 6  # more than most texts have
FRAME_TOKENS = 4  # fewer than most templates write around a turn
CONTEXT = 8  # tokens decoded with one, as what stands before it may change what it means
# What a piece is tokenised after: some tokenizers begin a text, or each text after a marker, with a
# space that is not there.
LEADS = ("", "x")


@dataclass(frozen=True)
class TokenSequence:
    id: str
    input_ids: list[int]
    loss_mask: list[bool]  # True where the token is part of a reply, or ends it


def render(tokenizer: Any, conversation: Conversation, *, max_length: int) -> list[TokenSequence]:
    """The sequences of one conversation, cut to `max_length` tokens.

    One sequence; one for each reply where the template rewrites history; none if no reply begins
    within `max_length`. Raises ValueError for a template whose replies cannot be located exactly.
    """
    return list(render_all(tokenizer, [conversation], max_length=max_length, counts=Counts()))


def render_all(
    tokenizer: Any, conversations: Iterable[Conversation], *, max_length: int, counts: Counts
) -> Iterator[TokenSequence]:
    """`render` for many conversations, faster; what is dropped or mended is added to `counts`."""
    if not tokenizer.is_fast:
        raise ValueError(
            f"The tokenizer of {tokenizer.name_or_path!r} ({type(tokenizer).__name__}) gives no "
            "character offsets. The target needs a tokenizer.json."
        )
    iterator = iter(conversations)
    while batch := list(islice(iterator, BATCH)):
        if not takes_system(tokenizer):
            batch = [_without_system(conversation, counts) for conversation in batch]
        yield from _render_batch(
            tokenizer, batch, max_length, max_chars=CHARS_PER_TOKEN * max_length, counts=counts
        )


def _without_system(conversation: Conversation, counts: Counts) -> Conversation:
    turns = fold_system(conversation.turns)
    if turns is not conversation.turns:
        counts.mend("system turn joined to the user's, as the template has none", conversation.id)
    return Conversation(conversation.id, tuple(turns))


def _render_batch(
    tokenizer: Any,
    conversations: Sequence[Conversation],
    max_length: int,
    *,
    max_chars: int | None,
    counts: Counts,
) -> Iterator[TokenSequence]:
    """Render the first turns of each conversation, up to the reply that passes `max_chars`."""
    heads = [_head(conversation.turns, max_chars) for conversation in conversations]
    groups = [
        chat_texts(tokenizer, conversation.id, head)
        for conversation, head in zip(conversations, heads, strict=True)
    ]
    encodings = iter(encode(tokenizer, [text.text for group in groups for text in group]))
    for conversation, head, group in zip(conversations, heads, groups, strict=True):
        encoded = [(text, next(encodings)) for text in group]
        is_cut = len(head) < len(conversation.turns)
        if is_cut and (not encoded or _num_tokens(*encoded[-1]) < max_length):
            # Most long texts need not be tokenised to their end; this one must.
            yield from _render_batch(
                tokenizer, [conversation], max_length, max_chars=None, counts=counts
            )
        else:
            yield from _sequences(tokenizer, conversation.id, encoded, max_length, counts)


def _head(turns: Sequence[Turn], max_chars: int | None) -> Sequence[Turn]:
    num_chars = 0
    for number, turn in enumerate(turns, 1):
        num_chars += len(turn.text) + FRAME_TOKENS * CHARS_PER_TOKEN
        if max_chars is not None and num_chars > max_chars and turn.role == "assistant":
            return turns[:number]
    return turns


def _num_tokens(text: ChatText, encoding: Any) -> int:
    """Tokens up to the end of the last reply."""
    return _first_after(encoding.offsets, text.replies[-1][1])


def _first_after(offsets: Sequence[Span], char: int) -> int:
    """The first token that ends after a character's beginning."""
    # Not by starts: some tokenizers leave out of them the space that begins a token.
    return bisect_right(offsets, char, key=lambda offset: offset[1])


def _sequences(
    tokenizer: Any, name: str, encoded: list[tuple[ChatText, Any]], max_length: int, counts: Counts
) -> list[TokenSequence]:
    """The usable sequences of one conversation, counted."""
    notes: dict[str, None] = {}  # a set in order
    sequences = [
        sequence
        for text, encoding in encoded
        if (sequence := _sequence(tokenizer, text, encoding, max_length, notes))
    ]
    for note in notes if sequences else ():
        counts.mend(note, name)
    if not sequences:
        counts.drop(next(reversed(notes), "text that the chat template rewrites"), name)
    return sequences


def _sequence(
    tokenizer: Any, text: ChatText, encoding: Any, max_length: int, notes: dict[str, None]
) -> TokenSequence | None:
    """Ids and mask of one text; None, and a note why, if it cannot be used."""
    if len(encoding.ids) > max_length:
        notes["cut to max_length"] = None
    ids, offsets = encoding.ids[:max_length], encoding.offsets[:max_length]
    mask, reaching_in = _mask(text, offsets)
    written_out = _written_out(text, ids, offsets, control_tokens(tokenizer))
    for token in sorted(reaching_in.keys() | written_out, reverse=True):  # indices before it hold
        first, stop = _run(offsets, token)
        start, end = offsets[first][0], offsets[stop - 1][1]
        cut = reaching_in.get(token, start + 1)  # half a control token is none
        parts = [text.text[start:cut], text.text[cut:end]]
        before = ids[_run(offsets, max(first - CONTEXT, 0))[0] : first]
        if halves := _cut(tokenizer, before, ids[first:stop], parts):
            left, right = halves
            is_reply = token in reaching_in or mask[token]
            mask[first:stop] = [mask[first]] * len(left) + [is_reply] * len(right)
            ids[first:stop] = left + right
        elif token in written_out:
            notes["control token in the text that cannot be spelled out"] = None
            return None
        else:
            notes["first token of a reply that cannot be parted from the prompt"] = None
    if written_out:
        notes["control token in the text spelled out"] = None
    ids, mask = ids[:max_length], mask[:max_length]
    if not any(first and second for first, second in pairwise(mask)):
        notes["no reply within max_length"] = None
        return None
    return TokenSequence(text.id, ids, mask)


def _mask(text: ChatText, offsets: Sequence[Span]) -> tuple[list[bool], dict[int, int]]:
    """Which tokens lie in a reply, and those that reach into one: token -> where it begins."""
    mask = [False] * len(offsets)
    reaching_in = {}
    for start, end in text.replies:
        first, last = _first_after(offsets, start), _first_after(offsets, end)
        if first < last and offsets[first][0] < start:
            reaching_in[first] = start
            first += 1
        mask[first:last] = [True] * (last - first)
    return mask, reaching_in


def _written_out(
    text: ChatText, ids: Sequence[int], offsets: Sequence[Span], control: frozenset[int]
) -> set[int]:
    """Which tokens are control tokens that come from the text of a turn."""
    starts = [start for start, _ in text.turns]
    found = set()
    for token in (token for token, id in enumerate(ids) if id in control):
        turn = bisect_right(starts, offsets[token][0]) - 1
        if turn >= 0 and offsets[token][0] < text.turns[turn][1]:
            found.add(token)
    return found


def _run(offsets: Sequence[Span], token: int) -> tuple[int, int]:
    """[first, last) token around one that between them have whole characters."""
    first, stop = token, token + 1
    while first > 0 and offsets[first - 1][1] > offsets[first][0]:
        first -= 1
    while stop < len(offsets) and offsets[stop][0] < offsets[stop - 1][1]:
        stop += 1
    return first, stop


def _cut(
    tokenizer: Any, before: list[int], ids: list[int], parts: list[str]
) -> tuple[list[int], list[int]] | None:
    """The ids of the two parts of a text; None if they do not stand for what `ids` does here."""
    known = tokenizer.decode(before)
    # Some markers swallow the space after them, so that only the spelling has it.
    same = (tokenizer.decode(before + ids), known + "".join(parts))
    for lead in LEADS:
        lead = f"{tokenizer.eos_token or ''}{lead}"
        skip = len(encode(tokenizer, [lead])[0].ids)
        left, right = (e.ids[skip:] for e in encode(tokenizer, [lead + part for part in parts]))
        if tokenizer.decode(before + left + right) in same:
            return left, right
    return None
