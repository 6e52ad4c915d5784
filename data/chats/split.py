"""Which conversations are kept out of training, decided by their ids alone."""

import hashlib
import re

# Up to 999 parts (ShareGPT has 593). Longer numbers and words after a `_` are chats of their own.
PART = re.compile(r"(.+?)_([0-9]{1,3})?(~.*)?", re.DOTALL)


def stem(sequence_id: str) -> str:
    """What the parts of one long chat have in common: `QWJhYvA` for `QWJhYvA_2`."""
    part = PART.fullmatch(sequence_id)
    return part[1] if part else sequence_id


def with_suffix(sequence_id: str, suffix: str) -> str:
    """Another id of the same stem, so that both stay on one side of the split."""
    separator = "_" if stem(sequence_id) == sequence_id else ""
    return f"{sequence_id}{separator}~{suffix}"


def is_heldout(sequence_id: str, *, share: float, seed: int) -> bool:
    """Whether a sequence belongs to the `share` of chats (0 to 1) that training never sees."""
    digest = hashlib.blake2b(f"{seed}:{stem(sequence_id)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
