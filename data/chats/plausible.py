"""Bounds beyond which the tokens of a data set look like a fault and not like chats.

Each stands for a failure that otherwise shows days later, as a head that is never accepted. They
are wide: an honest data set stays far inside.
"""

import logging
from collections.abc import Iterator

from data.chats.statistics import Statistics, percent
from data.config import DatasetConfig

log = logging.getLogger(__name__)

FEWEST_SEQUENCES = 20  # of fewer than these, shares say little
MIN_SHARE = 0.01  # supervised tokens: below, over 99 of 100 stored features train nothing
# Not a largest share: with short questions and long answers 99 % of the tokens are the replies'.
# But before each reply stand a user's turn and the template's marks, in any template.
MIN_PROMPT = 2.0  # unsupervised tokens for each reply
MIN_ENDED = 0.5  # whole replies with an end-of-turn token: a template ends all of them or none
MAX_CUT, MIN_SHARE_CUT = (
    0.9,
    0.1,
)  # sequences at max_length, if no more of their tokens is supervised
MIN_REPLY = 3  # tokens of the median reply: a word and its end leave one guess
MIN_DISTINCT = 0.1  # of the sequences: below, each is there more than ten times
MAX_TOKEN = 0.5  # of the supervised tokens for one token; in text it is 5 %, of bytes 20 %


def check_plausible(statistics: Statistics, dataset: DatasetConfig) -> None:
    """Raises ValueError that names each figure out of bounds, its bound, causes and what to do.

    With `dataset.allow_implausible`, the same text is a warning.
    """
    found = list(implausible(statistics))
    if not found:
        return
    faults = "\n".join(f"  - {fault}" for fault in found)
    message = (
        f"The tokens of {dataset.path} look wrong:\n{faults}\n"
        "`python -m scripts.preview_data` with the same target=, dataset= and max_length= shows "
        "them. "
    )
    if not dataset.allow_implausible:
        raise ValueError(f"{message}If they are as they should be: dataset.allow_implausible=true.")
    log.warning("%sTaken all the same (dataset.allow_implausible=true).", message)


def implausible(statistics: Statistics) -> Iterator[str]:
    """One sentence or two for each figure that is out of bounds."""
    s = statistics
    if s.sequences < FEWEST_SEQUENCES:
        return
    if s.share < MIN_SHARE:
        yield (
            f"{percent(s.share, 2)} of the tokens are supervised, expected at least "
            f"{percent(MIN_SHARE, 0)}. The replies are not where the reader looks for them, or the "
            "prompts are far longer than the replies: check the fields of the records; shorten the "
            "prompts."
        )
    prompt = (s.tokens - s.supervised) / s.replies
    if prompt < MIN_PROMPT:
        yield (
            f"{prompt:.1f} tokens a reply are not supervised, expected at least {MIN_PROMPT:.0f}: "
            "the user's turn and the template's marks before it. The mask covers the prompts: "
            "the chat template or the tokenizer is not the target's."
        )
    if s.ended_share < MIN_ENDED:
        yield (
            f"{percent(s.ended_share)} of the replies that are not cut off end with an end-of-turn "
            f"token, expected at least {percent(MIN_ENDED, 0)}. The chat template writes none, or "
            "the tokenizer does not know it as one token; a head would never learn where replies "
            "end: use the chat template and the tokenizer that are served."
        )
    cut = s.at_max_length / s.sequences
    if cut > MAX_CUT and s.share < MIN_SHARE_CUT:
        yield (
            f"{percent(cut, 0)} of the sequences reach max_length={s.max_length} and "
            f"{percent(s.share)} of their tokens are supervised, expected at most "
            f"{percent(MAX_CUT, 0)} or at least {percent(MIN_SHARE_CUT, 0)}. Prompts fill the "
            "sequences and the replies are cut off: raise max_length, or shorten the prompts."
        )
    if s.reply_lengths.median < MIN_REPLY:
        yield (
            f"the median reply has {s.reply_lengths.median} tokens with its end, expected at least "
            f"{MIN_REPLY}. Something else was read as the reply (a label, a score), or there is "
            "nothing to draft in so short replies: check the fields of the records."
        )
    if s.distinct / s.sequences < MIN_DISTINCT:
        yield (
            f"{s.distinct:,} of {s.sequences:,} sequences differ, expected at least "
            f"{percent(MIN_DISTINCT, 0)}. The file holds the same chats again and again: a broken "
            "export, or one that was appended to on each run."
        )
    top = s.top_count / s.supervised
    if top > MAX_TOKEN:
        yield (
            f"token {s.top_token} ({s.top_text!r}) is {percent(top, 0)} of the supervised tokens, "
            f"expected at most {percent(MAX_TOKEN, 0)}. The tokenizer does not know the text (an "
            "unknown token), or the replies are filler: look at both."
        )
