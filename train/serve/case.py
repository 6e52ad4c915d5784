"""A head's folder held against its target, and what is said of it."""

from dataclasses import dataclass, field

from torch import Tensor

from train.serve.folder import HeadFolder
from train.serve.rules import ENGINES
from train.serve.shapes import Sizes, config_sizes, normal_name
from train.serve.target_facts import TargetFacts


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A rule of RULES that a folder breaks."""

    rule: str
    subject: str  # tensor, key or file
    found: str
    engines: tuple[str, ...] = ENGINES


@dataclass(frozen=True, kw_only=True)
class Case:
    """A folder against a target. `tensors` have the names that engines expect, where possible."""

    folder: HeadFolder
    facts: TargetFacts
    tensors: dict[str, Tensor] = field(init=False)
    sizes: Sizes = field(init=False)

    def __post_init__(self) -> None:
        names = {name: normal_name(name, self.folder.tensors) for name in self.folder.tensors}
        tensors = {names[name]: tensor for name, tensor in self.folder.tensors.items()}
        object.__setattr__(self, "tensors", tensors)
        object.__setattr__(self, "sizes", config_sizes(self.folder.keys))


def some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
