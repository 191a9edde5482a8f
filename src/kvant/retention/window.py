"""The last `window` rows stay, and the first `sinks`.

A query at position p sees (p - window, p], itself included, and positions below `sinks`.
Sinks may outnumber the window. Knows lengths only, never rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Window:
    """A query sees its last `window` positions and the first `sinks` ones."""

    name: ClassVar[str] = "window"
    window: int
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window={self.window}: at least 1, every token sees itself")
        if self.sinks < 0:
            raise ValueError(f"sinks={self.sinks}: at least 0 rows can stay, try sinks=0")

    def keep(self, length: int) -> int:
        """The first row that the last token seen still sees: the next query needs one fewer."""
        return max(0, length - self.window)

    def reachable(self, to: int, first: int) -> int:
        """All or nothing: a shorter length needs still older rows."""
        return to if self.keep(to) >= first else 0
