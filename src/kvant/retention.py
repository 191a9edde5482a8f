"""Retention rules: which rows a layer retains, from lengths alone.

RETENTIONS gives each rule its name in files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvant.contracts import Retention

# The default for windows of the spec language. Many models put most of their attention on the first
# tokens, so that a window without them degrades all later predictions.
DEFAULT_WINDOW_SINKS = 4


@dataclass(frozen=True)
class KeepAll:
    """No window: a query sees every token before it, and the first `sinks` are always dense."""

    name: ClassVar[str] = "all"
    window: ClassVar[int | None] = None
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ValueError(f"sinks={self.sinks}: 0 or more rows are needed, such as sinks=0")

    def find_first_retained(self, length: int) -> int:
        """Return 0, for any length."""
        return 0


@dataclass(frozen=True)
class Window:
    """A query at position p sees (p - window, p], itself included, and positions below `sinks`.

    There may be more sinks than rows in the window.
    """

    name: ClassVar[str] = "window"
    window: int
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(
                f"window={self.window}: 1 or more is needed, because a token sees itself"
            )
        if self.sinks < 0:
            raise ValueError(f"sinks={self.sinks}: 0 or more rows are needed, such as sinks=0")

    def find_first_retained(self, length: int) -> int:
        """Return the first row that the newest token sees; the next query needs one row less."""
        return max(0, length - self.window)


RETENTIONS: dict[str, type[Retention]] = {"all": KeepAll, "window": Window}
