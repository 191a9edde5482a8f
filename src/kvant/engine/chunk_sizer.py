"""What reading a prompt takes, learnt as it goes: how large may a chunk be that others wait for?"""

from __future__ import annotations

import numpy as np

TIMING_DECAY = 0.9  # what a chunk before counts beside the newest one
CHUNK_ALIGNMENT = 64  # chunks end at multiples of it, whatever they took
CHUNK_TIME_TOLERANCE = (
    1.1  # times what there is, for a chunk that ends a prompt, and for several together
)


class ChunkSizer:
    """Seconds = a + tokens * (b + c * tokens before), by the chunks that were timed."""

    def __init__(
        self, max_chunk: int, *, supports_chunks: bool = True, fixed_size: bool = False
    ) -> None:
        """Chunks are of `chunk` tokens at most, and whole prompts where a model does not go on.

        `fixed`: chunks end at multiples of `chunk`, whatever they take.
        """
        self.fixed_size = fixed_size
        self.max_chunk = max_chunk
        self.supports_chunks = supports_chunks
        self._normal_matrix = np.zeros((3, 3))
        self._normal_vector = np.zeros(3)

    def choose_chunk(self, num_computed: int, end: int, max_seconds: float) -> int:
        """How many tokens to read next, within so many seconds if that is possible."""
        if not self.supports_chunks:
            return end - num_computed
        if self.fixed_size:
            return min((num_computed // self.max_chunk + 1) * self.max_chunk, end) - num_computed
        count, rest = self.max_chunk, end - num_computed
        if (
            rest <= count
            and self.predict_seconds(rest, num_computed) <= CHUNK_TIME_TOLERANCE * max_seconds
        ):
            return rest
        while count > CHUNK_ALIGNMENT and self.predict_seconds(count, num_computed) > max_seconds:
            count -= CHUNK_ALIGNMENT
        stop = (num_computed + count) // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT
        return min(stop if stop > num_computed else num_computed + count, end) - num_computed

    def predict_seconds(self, count: int, num_computed: int) -> float:
        """What a chunk will take; 0 before the first one was timed."""
        if not self._normal_vector.any():
            return 0.0
        scale = np.sqrt(np.diag(self._normal_matrix)).clip(1e-12)
        ridge = self._normal_matrix / np.outer(scale, scale) + 1e-6 * np.eye(3)
        found = np.linalg.solve(ridge, self._normal_vector / scale) / scale
        return float(_make_features(count, num_computed) @ found.clip(0.0))

    def record_time(self, count: int, num_computed: int, seconds: float) -> None:
        """Learn of a chunk, relative to what it took: small ones count as large ones do."""
        row = _make_features(count, num_computed) / max(seconds, 1e-9)
        self._normal_matrix = TIMING_DECAY * self._normal_matrix + np.outer(row, row)
        self._normal_vector = TIMING_DECAY * self._normal_vector + row


def _make_features(count: int, num_computed: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([1.0, count, count * (num_computed + count / 2)])
