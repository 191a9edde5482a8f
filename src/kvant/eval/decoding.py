"""Decode tokens as `kvant run` does, and time them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from torch import Tensor

from kvant.generation.decoder import TransformersDecoder
from kvant.hf import TransformersCache

WARMUP_TOKENS = 16  # the first tokens are not timed: forwards are captured for replay


def decode_token(decoder: TransformersDecoder, token: int, cache: TransformersCache) -> Tensor:
    """Return the logits [vocabulary] after a token, on the CPU."""
    return decoder.compute_batch_logits([[token]], [cache.length], cache)[0, 0].cpu()


def measure_token_seconds(seconds: Sequence[float]) -> float:
    """Return the median time of a token of one text, without the first tokens."""
    return median(seconds[min(WARMUP_TOKENS, len(seconds) // 2) :])
