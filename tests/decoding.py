"""Ways to draft that several tests of decoding use."""

from train.decode import Drafting

PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0]]
DRAFTINGS = {
    "chain": Drafting.chain(3),
    "static": Drafting.static(PATHS),
    "dynamic": Drafting.dynamic(num_steps=3, topk=3, num_draft_tokens=9),
}


def path_tokens(tokens: list[int], parents: list[int], node: int) -> list[int]:
    """The tokens from the root, left out, to a node."""
    found: list[int] = []
    while node:
        found.append(tokens[node])
        node = parents[node]
    return found[::-1]
