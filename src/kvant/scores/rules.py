"""The scores that rank rows for a prune: by attention weights, by keys, or at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvant.retention import Score, ScoreInput

if TYPE_CHECKING:
    from torch import Tensor


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


if TYPE_CHECKING:
    from torch import Tensor

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


if TYPE_CHECKING:
    from torch import Tensor


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


if TYPE_CHECKING:
    from torch import Tensor

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


if TYPE_CHECKING:
    from torch import Tensor


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


if TYPE_CHECKING:
    from torch import Tensor


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
