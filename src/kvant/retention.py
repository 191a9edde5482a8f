"""The rows that a layer retains: by lengths alone (`Retention`), or by scores (`Pruning`).

RETENTIONS gives each rule on lengths its name in files, SCORES each score its name in specs. Scores
rank rows by attention weights, by keys, or at random. The weights of `kvzip` are those of a second
pass, in which the model repeats its prompt.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:  # parsing a spec and --help work without importing torch
    from torch import Tensor

# The default for windows of the spec language. Many models put most of their attention on the first
# tokens, so that a window without them degrades all later predictions.
DEFAULT_WINDOW_SINKS = 4


class Retention(Protocol):
    """A frozen dataclass whose two integers decide which rows are retained.

    Kernels, masks and plans read `window` and `sinks`, which never change.
    """

    @property
    def window(self) -> int | None:
        """The newest rows that a query sees; None: all."""
        return None

    @property
    def sinks(self) -> int:
        """The first rows of a sequence that are always retained, dense."""
        return 0

    def find_first_retained(self, length: int) -> int:
        """Return the first row, sinks aside, to retain in a sequence of `length` tokens."""
        return 0 if self.window is None else max(0, length - self.window)


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

    Rows are aligned at the newest token, without a frame, in float32; as they are stored if the
    score needs a second pass.
    """

    keys: Tensor  # [N, n, D]
    values: Tensor  # [N, n, Dv]
    valid: Tensor  # [N, n], boolean: heads may have different numbers of rows
    queries: Tensor | None  # [N, group, m, D]: the newest, if the score needs any
    query_rows: Tensor | None  # [N, m]: the row of each query; below zero: padding
    scale: float  # of attention scores
    heads_per_sequence: int
    max_attention: Tensor | None = None  # [N, n]: in a second pass, if the score needs one


class Score(Protocol):
    """A frozen dataclass that ranks the rows of a key head by their value for later tokens."""

    @property
    @abstractmethod
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

    @property
    def repeats_prompt(self) -> bool:
        """Whether it needs a second pass over the prompt, which the model then repeats."""
        return False

    @abstractmethod
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


def compute_attention_weights(rows: ScoreInput) -> Tensor:
    """Return the mean attention weight of each row over the queries, [N, group, n].

    Computes one head at a time, which bounds the scratch.
    """
    import torch

    assert rows.queries is not None and rows.query_rows is not None
    means = []
    for keys, valid, queries, query_rows in zip(
        rows.keys, rows.valid, rows.queries, rows.query_rows, strict=True
    ):
        causal = torch.arange(len(keys), device=keys.device) <= query_rows[:, None]  # [m, n]
        visible = valid & causal
        logits = (queries @ keys.T * rows.scale).masked_fill(~visible, float("-inf"))
        weights = logits.softmax(-1).nan_to_num()  # padding queries see no row
        means.append(weights.sum(1) / (query_rows >= 0).sum().clamp(min=1))
    return torch.stack(means)


POOLING_WIDTH = 5  # rows over which weights are averaged: neighbours of a key row matter too


@dataclass(frozen=True)
class SnapKV(Score):
    """Score rows by the attention weights of the newest queries, averaged over neighbours."""

    name: ClassVar[str] = "snapkv"
    num_queries: ClassVar[int] = 64

    def score_rows(self, rows: ScoreInput) -> Tensor:
        from torch.nn.functional import avg_pool1d

        return avg_pool1d(
            compute_attention_weights(rows), POOLING_WIDTH, stride=1, padding=POOLING_WIDTH // 2
        ).mean(1)


@dataclass(frozen=True)
class Tova(Score):
    """Score rows by the attention weights of the newest query, averaged over all heads."""

    name: ClassVar[str] = "tova"
    prunes_during_decode: ClassVar[bool] = True
    num_queries: ClassVar[int] = 1

    def score_rows(self, rows: ScoreInput) -> Tensor:
        heads, count = rows.valid.shape
        weights = (
            compute_attention_weights(rows)
            .mean(1)
            .view(-1, rows.heads_per_sequence, count)
            .mean(1, keepdim=True)
        )
        return weights.expand(-1, rows.heads_per_sequence, -1).reshape(heads, count)


NUM_PROTECTED_FIRST_ROWS = 4  # always retained: many heads attend to them (attention sinks)


@dataclass(frozen=True)
class ExpectedAttention(Score):
    """Score rows by their expected attention under a Gaussian model of the queries."""

    name: ClassVar[str] = "expected"
    num_queries: ClassVar[int] = 512

    def score_rows(self, rows: ScoreInput) -> Tensor:
        import torch

        assert rows.queries is not None and rows.query_rows is not None
        weights = []
        for keys, valid, queries, query_rows in zip(
            rows.keys, rows.valid, rows.queries, rows.query_rows, strict=True
        ):
            queries = queries[:, query_rows >= 0] * rows.scale  # [group, m, D]
            mean = queries.mean(1, keepdim=True)
            centered = queries - mean
            covariance = centered.transpose(1, 2) @ centered / queries.shape[1]
            logits = (mean @ keys.T).squeeze(1) + ((keys @ covariance) * keys).sum(-1) / 2
            weights.append(logits.masked_fill(~valid, float("-inf")).softmax(-1).mean(0))
        scores = torch.stack(weights) * rows.values.norm(dim=-1)
        row_number = rows.valid.long().cumsum(1)  # from 1
        is_protected = rows.valid & (row_number <= NUM_PROTECTED_FIRST_ROWS)
        # Below infinity, which the caller gives to the newest rows.
        protected: Tensor = scores.masked_fill(is_protected, torch.finfo(scores.dtype).max)
        return protected


@dataclass(frozen=True)
class KeyDiff(Score):
    """Score keys by their negative cosine to the mean direction of the head's keys."""

    name: ClassVar[str] = "keydiff"
    prunes_during_decode: ClassVar[bool] = True

    def score_rows(self, rows: ScoreInput) -> Tensor:
        from torch.nn.functional import normalize

        directions = normalize(rows.keys, dim=-1)
        valid = rows.valid.unsqueeze(-1)
        mean = (directions * valid).sum(1, keepdim=True) / valid.sum(1, keepdim=True)
        return -(directions * normalize(mean, dim=-1)).sum(-1)


@dataclass(frozen=True)
class KVzip(Score):
    """Score rows by the largest attention weight that they get while the model repeats its prompt.

    So it retains what repeating the prompt needs, whatever is asked later (arXiv 2505.23416).
    """

    name: ClassVar[str] = "kvzip"
    repeats_prompt: ClassVar[bool] = True

    def score_rows(self, rows: ScoreInput) -> Tensor:
        assert rows.max_attention is not None
        return rows.max_attention


@dataclass(frozen=True)
class RandomScore(Score):
    """Score rows at random, seeded by the number of rows of a sequence.

    Sequences with equally many rows get the same scores on every device.
    """

    name: ClassVar[str] = "random"
    prunes_during_decode: ClassVar[bool] = True

    def score_rows(self, rows: ScoreInput) -> Tensor:
        import torch

        count = rows.valid.shape[1]
        scores = torch.zeros(rows.valid.shape)
        for first in range(0, len(scores), rows.heads_per_sequence):
            heads = slice(first, first + rows.heads_per_sequence)
            num_rows = int(rows.valid[heads].any(0).sum())
            generator = torch.Generator().manual_seed(num_rows)
            scores[heads, count - num_rows :] = torch.rand(
                rows.heads_per_sequence, num_rows, generator=generator
            )
        return scores.to(rows.valid.device)


SCORES: dict[str, type[Score]] = {
    "snapkv": SnapKV,
    "expected": ExpectedAttention,
    "keydiff": KeyDiff,
    "tova": Tova,
    "kvzip": KVzip,
    "random": RandomScore,
}
