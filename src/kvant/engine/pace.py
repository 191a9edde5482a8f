"""What reading a prompt takes, learnt as it goes: how large may a chunk be that others wait for?"""

from __future__ import annotations

import numpy as np

FORGOTTEN = 0.9  # what a chunk before counts beside the newest one
PAGE = 64  # chunks end at multiples of it, whatever they took
LEEWAY = 1.1  # times what there is, for a chunk that ends a prompt, and for several together


class Pace:
    """Seconds = a + tokens * (b + c * tokens before), by the chunks that were timed."""

    def __init__(self, chunk: int, *, continues: bool = True, fixed: bool = False) -> None:
        """Chunks are of `chunk` tokens at most, and whole prompts where a model does not go on.

        `fixed`: chunks end at multiples of `chunk`, whatever they take.
        """
        self.fixed = fixed
        self.largest = chunk
        self.continues = continues
        self._normal = np.zeros((3, 3))
        self._sums = np.zeros(3)

    def chunk(self, read: int, prompt: int, most: float) -> int:
        """How many tokens to read next, within so many seconds if that is possible."""
        if not self.continues:
            return prompt - read
        if self.fixed:
            return min((read // self.largest + 1) * self.largest, prompt) - read
        count, rest = self.largest, prompt - read
        if rest <= count and self.seconds(rest, read) <= LEEWAY * most:
            return rest
        while count > PAGE and self.seconds(count, read) > most:
            count -= PAGE
        stop = (read + count) // PAGE * PAGE
        return min(stop if stop > read else read + count, prompt) - read

    def seconds(self, count: int, read: int) -> float:
        """What a chunk will take; 0 before the first one was timed."""
        if not self._sums.any():
            return 0.0
        scale = np.sqrt(np.diag(self._normal)).clip(1e-12)
        ridge = self._normal / np.outer(scale, scale) + 1e-6 * np.eye(3)
        found = np.linalg.solve(ridge, self._sums / scale) / scale
        return float(_asked(count, read) @ found.clip(0.0))

    def took(self, count: int, read: int, seconds: float) -> None:
        """Learn of a chunk, relative to what it took: small ones count as large ones do."""
        row = _asked(count, read) / max(seconds, 1e-9)
        self._normal = FORGOTTEN * self._normal + np.outer(row, row)
        self._sums = FORGOTTEN * self._sums + row


def _asked(count: int, read: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([1.0, count, count * (read + count / 2)])
