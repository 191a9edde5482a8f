"""Decode many continuations at once: forks of caches, merged into one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from kvant.generation.decoder import TransformersDecoder
from kvant.hf import TransformersCache


class ForkedBatch:
    """Forks of one model's caches, which share their pages; each step decodes a token of each."""

    def __init__(self, decoder: TransformersDecoder, forks: Sequence[TransformersCache]) -> None:
        self._decoder = decoder
        self._positions = [fork.length for fork in forks]
        self._cache = forks[0].merge_with(forks[1:])

    def decode(self, tokens: list[int]) -> Tensor:
        """Return the logits [sequences, vocabulary] after a token of each sequence."""
        columns = [[token] for token in tokens]
        logits = self._decoder.compute_batch_logits(columns, self._positions, self._cache)[:, 0]
        self._positions = [position + 1 for position in self._positions]
        return logits


def continue_greedily(
    decoder: TransformersDecoder,
    forks: Sequence[TransformersCache],
    logits: Tensor,
    max_tokens: int,
    is_complete: Callable[[list[int]], bool] = lambda tokens: False,
) -> list[list[int]]:
    """Return greedy continuations, `logits` [sequences, vocabulary] being those before the first.

    Each ends when it is complete, or with `max_tokens` tokens.
    """
    batch = ForkedBatch(decoder, forks)
    tokens = logits.argmax(-1).tolist()
    continuations = [[token] for token in tokens]
    for _ in range(max_tokens - 1):
        incomplete = [not is_complete(continuation) for continuation in continuations]
        if not any(incomplete):
            break
        tokens = batch.decode(tokens).argmax(-1).tolist()
        for continuation, token, goes_on in zip(continuations, tokens, incomplete, strict=True):
            if goes_on:
                continuation.append(token)
    return continuations
