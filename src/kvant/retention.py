"""Which rows must stay, from lengths alone. A line in RETENTIONS gives a rule its name in files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvant.contracts import Retention

# Sinks of a window that a spec asks for, unless it gives a number. Many models put most of their
# attention on the first tokens: a window that drops those spoils every later prediction.
DEFAULT_WINDOW_SINKS = 4


@dataclass(frozen=True)
class KeepAll:
    """No window: a query sees every token before it, the first `sinks` of them dense for ever."""

    name: ClassVar[str] = "all"
    window: ClassVar[int | None] = None
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ValueError(f"sinks={self.sinks}: at least 0 rows can stay, try sinks=0")

    def find_first_retained(self, length: int) -> int:
        """Row 0, whatever `length`."""
        return 0


@dataclass(frozen=True)
class Window:
    """The query at position p sees (p - window, p], itself included, and positions below `sinks`.

    Sinks may outnumber the window.
    """

    name: ClassVar[str] = "window"
    window: int
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window={self.window}: at least 1, every token sees itself")
        if self.sinks < 0:
            raise ValueError(f"sinks={self.sinks}: at least 0 rows can stay, try sinks=0")

    def find_first_retained(self, length: int) -> int:
        """The first row that the last token seen still sees: the next query needs one fewer."""
        return max(0, length - self.window)


RETENTIONS: dict[str, type[Retention]] = {"all": KeepAll, "window": Window}
