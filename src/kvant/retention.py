"""The rows that a layer retains: by lengths alone (`Retention`), or by scores (`Pruning`).

RETENTIONS gives each rule on lengths its name in files; scores/ defines the scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:  # parsing a spec and --help work without importing torch
    from torch import Tensor

# The default for windows of the spec language. Many models put most of their attention on the first
# tokens, so that a window without them degrades all later predictions.
DEFAULT_WINDOW_SINKS = 4


class Retention(Protocol):
    """The rule, on integers alone, that decides which rows are retained."""

    @property
    def window(self) -> int | None:
        """The newest rows that a query sees; None: all."""

    @property
    def sinks(self) -> int:
        """The first rows of a sequence that are always retained, dense."""

    def find_first_retained(self, length: int) -> int:
        """Return the first row, sinks aside, to retain in a sequence of `length` tokens."""


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


class ScoreInput(NamedTuple):
    """The rows that a prune scores, of N key heads; the heads of a sequence are adjacent.

    Rows are aligned at the newest token, without a frame, in float32.
    """

    keys: Tensor  # [N, n, D]
    values: Tensor  # [N, n, Dv]
    valid: Tensor  # [N, n], boolean: heads may have different numbers of rows
    queries: Tensor | None  # [N, group, m, D]: the newest, if the score needs any
    query_rows: Tensor | None  # [N, m]: the row of each query; below zero: padding
    scale: float  # of attention scores
    heads_per_sequence: int


class Score(Protocol):
    """A frozen dataclass that ranks the rows of a key head by their value for later tokens."""

    @property
    def name(self) -> str:
        """The name in specs and files."""

    @property
    def num_queries(self) -> int:
        """The number of newest queries that it needs."""
        return 0

    @property
    def prunes_during_decode(self) -> bool:
        """Whether it prunes during decoding as well, not only after a prompt."""
        return False

    def score_rows(self, rows: ScoreInput) -> Tensor:
        """Return scores [N, n]; rows with the largest are retained."""


@dataclass(frozen=True)
class Pruning:
    """The number of rows that a key head retains after a prompt, and their score."""

    score: Score
    rows: int = 0  # a number of rows,
    percent: float = 0.0  # or a share of the tokens
    adaptive: bool = False  # the heads of a layer share one budget

    def __post_init__(self) -> None:
        single_budget = (self.rows > 0) != (self.percent > 0)
        if not (single_budget and self.rows >= 0 and 0 <= self.percent <= 100):
            raise ValueError(
                f"a prune that keeps {self.rows} rows and {self.percent}%: one row or more, "
                "or a share up to 100% is needed"
            )

    def compute_budget(self, length: int) -> int:
        """Return the rows that a head retains of `length` tokens."""
        return self.rows or math.ceil(length * self.percent / 100)
