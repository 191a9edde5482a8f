"""Choose the size of prefill chunks from measured times, to limit the delay of decodes."""

from __future__ import annotations

import numpy as np

TIMING_DECAY = 0.9  # weight of earlier chunks against the newest one
CHUNK_ALIGNMENT = 64  # chunks end at positions that are multiples of this
# The last chunk of a prompt, or several chunks in a row, may take this multiple of the time limit.
CHUNK_TIME_TOLERANCE = 1.1


class ChunkSizer:
    """Choose chunks by predicted times, which are fitted to measured ones.

    The fit is seconds = a + b * count + c * count * (num_computed + count / 2).
    """

    def __init__(
        self, max_chunk: int, *, supports_chunks: bool = True, fixed_size: bool = False
    ) -> None:
        """Limit chunks to `max_chunk` tokens, or to whole prompts without `supports_chunks`.

        With `fixed_size`, chunks end at multiples of `max_chunk`, whatever time they take.
        """
        self.fixed_size = fixed_size
        self.max_chunk = max_chunk
        self.supports_chunks = supports_chunks
        self._normal_matrix = np.zeros((3, 3))
        self._normal_vector = np.zeros(3)

    def choose_chunk(self, num_computed: int, end: int, max_seconds: float) -> int:
        """Return the size of the next chunk, up to `end` and within `max_seconds` if possible."""
        if not self.supports_chunks:
            return end - num_computed
        if self.fixed_size:
            return min((num_computed // self.max_chunk + 1) * self.max_chunk, end) - num_computed
        count, remaining = self.max_chunk, end - num_computed
        if remaining <= count:
            seconds = self.predict_seconds(remaining, num_computed)
            if seconds <= CHUNK_TIME_TOLERANCE * max_seconds:
                return remaining
        while count > CHUNK_ALIGNMENT and self.predict_seconds(count, num_computed) > max_seconds:
            count -= CHUNK_ALIGNMENT
        stop = (num_computed + count) // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT
        return min(stop if stop > num_computed else num_computed + count, end) - num_computed

    def predict_seconds(self, count: int, num_computed: int) -> float:
        """Return the predicted seconds of a chunk; 0 before the first measurement."""
        if not self._normal_vector.any():
            return 0.0
        scale = np.sqrt(np.diag(self._normal_matrix)).clip(1e-12)
        ridge = self._normal_matrix / np.outer(scale, scale) + 1e-6 * np.eye(3)
        coefficients = np.linalg.solve(ridge, self._normal_vector / scale) / scale
        return float(_make_features(count, num_computed) @ coefficients.clip(0.0))

    def record_time(self, count: int, num_computed: int, seconds: float) -> None:
        """Add a measured chunk, weighted by 1 / seconds: the fit minimizes relative errors."""
        row = _make_features(count, num_computed) / max(seconds, 1e-9)
        self._normal_matrix = TIMING_DECAY * self._normal_matrix + np.outer(row, row)
        self._normal_vector = TIMING_DECAY * self._normal_vector + row


def _make_features(count: int, num_computed: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([1.0, count, count * (num_computed + count / 2)])
