"""Every row stays.

Sinks mark rows that are seen dense for ever. Knows lengths only, never rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class All:
    """No window: a query sees every token before it, the first `sinks` of them dense."""

    name: ClassVar[str] = "all"
    window: ClassVar[int | None] = None
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ValueError(f"sinks={self.sinks}: at least 0 rows can stay, try sinks=0")

    def keep(self, length: int) -> int:
        """Row 0, whatever `length`."""
        return 0

    def reachable(self, to: int, first: int) -> int:
        return to if first == 0 else 0
