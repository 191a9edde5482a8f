"""How a loop uses its memory: what is kept, what is computed anew, and who makes room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvant.errors import SpecError
from kvant.generation.adaptive import Adaptive
from kvant.generation.decoder import Memory
from kvant.sizes import parse_size

NAMES = ("always", "disabled", "long", "adaptive")


class Strategy(Protocol):
    """How a loop uses a memory; it changes no token where the memory is exact."""

    def remembers(self, length: int) -> bool:
        """Is a sequence of so many tokens kept? What is kept once stays so as it grows."""

    def first(self, chunk: int) -> int:
        """How many tokens are read first, of which at most so many go into a forward."""

    def relieve(self, memory: Memory, coming: int) -> None:
        """Make room for so many tokens, if need be: before every forward, and after the first."""


@dataclass(frozen=True)
class Always:
    """Keep everything."""

    def remembers(self, length: int) -> bool:
        return True

    def first(self, chunk: int) -> int:
        return chunk

    def relieve(self, memory: Memory, coming: int) -> None: ...


@dataclass(frozen=True)
class Disabled:
    """Compute everything anew: slow, and the reference for all others."""

    def remembers(self, length: int) -> bool:
        return False

    def first(self, chunk: int) -> int:
        return chunk

    def relieve(self, memory: Memory, coming: int) -> None: ...


@dataclass(frozen=True)
class Long:
    """Keep only what is longer than `threshold` tokens."""

    threshold: int = 512

    def __post_init__(self) -> None:
        if self.threshold < 0:
            raise ValueError(f"threshold={self.threshold}: 0 or more tokens are needed")

    def remembers(self, length: int) -> bool:
        return length > self.threshold

    def first(self, chunk: int) -> int:
        return chunk

    def relieve(self, memory: Memory, coming: int) -> None: ...


ALWAYS = Always()


def strategy_of(name: str, threshold: int = 512, budget: int | str | None = None) -> Strategy:
    """The strategy of that name; the numbers are those of `long` and of `adaptive`: 64MiB too."""
    if budget is not None and name != "adaptive":
        raise SpecError(f"budget={budget} with strategy={name!r}: only 'adaptive' has one")
    if name == "adaptive":
        if budget is None:
            raise SpecError("strategy='adaptive' needs budget=, the bytes that the cache may take")
        return Adaptive(parse_size(budget) if isinstance(budget, str) else budget)
    made: dict[str, Strategy] = {
        "always": ALWAYS,
        "disabled": Disabled(),
        "long": Long(threshold),
    }
    if name not in made:
        raise SpecError(f"strategy={name!r}: allowed are {', '.join(NAMES)}")
    return made[name]
