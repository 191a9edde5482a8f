"""Pool the hidden states of a prompt chunk by chunk; the client's side of an embedding request."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from kvant.checkpoints.pooling import Pooling
from kvant.engine.future import RequestFuture
from kvant.errors import CacheError
from kvant.generation import TransformersDecoder
from kvant.hf import TransformersCache


class Pooler:
    """Pools the hidden states of a prompt in float32, whatever its chunks are."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._sum: Tensor | None = None  # [width], over all tokens so far
        self._count = 0

    def pool_chunk(
        self, decoder: TransformersDecoder, ids: list[int], cache: TransformersCache
    ) -> Tensor:
        """Run the next chunk; return the embedding [width] of the prompt so far."""
        rows = decoder.compute_hidden_states(ids, cache)
        pooled = rows[-1].float().clone()  # a view would keep all rows
        if self._pooling.method == "mean":
            total = rows.sum(0, dtype=torch.float32)
            self._sum = total if self._sum is None else self._sum + total
            self._count += len(rows)
            pooled = self._sum / self._count
        return torch.nn.functional.normalize(pooled, dim=0) if self._pooling.normalize else pooled


class EmbeddingFuture(RequestFuture[Tensor]):
    """The client's side of an embedding request; threads use `result`, event loops `await`."""

    _embedding: Tensor | None = None

    def result(self, timeout: float | None = None) -> Tensor:
        """Wait for the embedding [width] in float32, on the CPU."""
        self._wait_until_done(timeout)
        if self._embedding is None:
            raise CacheError("the request was cancelled before its embedding was computed")
        return self._embedding

    def __await__(self) -> Generator[Any, None, Tensor]:
        while True:
            with self._changed:
                if self._is_done:
                    return self.result()
                waiter = self._add_waiter()
            yield from waiter

    @property
    def _is_complete(self) -> bool:
        return self._embedding is not None

    def put(self, item: Tensor) -> None:
        """Set the embedding; raise if it is not finite."""
        if not item.isfinite().all():
            raise CacheError("the embedding is not finite: the model's hidden states are not")
        self._embedding = item.cpu()
