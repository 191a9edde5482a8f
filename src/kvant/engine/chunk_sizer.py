"""Choose the next forward of an engine, and how many tokens of a prompt it prefills."""

from __future__ import annotations

import math

import numpy as np

from kvant.adapters import Adapter
from kvant.engine.actions import Decode, EncodeImage, ForwardAction, Prefill, PromptAction, Repeat
from kvant.engine.request import Request

TIMING_DECAY = 0.9  # weight of earlier chunks against the newest one
CHUNK_ALIGNMENT = 64  # chunks end at positions that are multiples of this
# The last chunk of a prompt, or several chunks in a row, may take this multiple of the time limit.
CHUNK_TIME_TOLERANCE = 1.1
# A decode may wait `chunk_seconds` for each prompt in prefill, but for at most this many prompts.
MAX_TIMED_PROMPTS = 4


class ChunkSizer:
    """Choose the next forward, and the size of each prefill chunk by its predicted time.

    Predictions come from a least-squares fit to measured chunks. For `count` tokens after
    `num_computed` ones, it is

        seconds = a + b * count + c * count * (num_computed + count / 2)
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
        self._normal_matrix = np.zeros((3, 3))  # of the normal equations of the fit
        self._normal_vector = np.zeros(3)
        self._seconds_per_image_token = 0.0
        self._last_was_oldest = False  # whether the last chunk was of the oldest prompt
        # By adapter: the prefill time since its last decode, and the number of that decode.
        self._decode_delays_s: dict[Adapter | None, float] = {}
        self._last_turns: dict[Adapter | None, int] = {}
        self._num_decodes = 0

    def choose_forward(self, running: list[Request], chunk_seconds: float) -> ForwardAction | None:
        """Return the next chunk if decodes can wait for it, else a decode of all that are ready.

        The decode is of one adapter: the one that was decoded least recently.
        """
        active = [r for r in running if r.is_active and not r.store_deadline_ms]
        prefilling = [request for request in active if not request.is_decoding]
        decoding = [request for request in active if request.is_decoding]
        if prefilling:
            num_prompts = min(len(prefilling), MAX_TIMED_PROMPTS)
            max_seconds = chunk_seconds * num_prompts if decoding else math.inf
            action = self._make_chunk(self._choose_prefill(prefilling), max_seconds)
            previous = max((self._decode_delays_s.get(r.adapter, 0.0) for r in decoding), default=0)
            delay = previous + self._predict_chunk(action)
            if not previous or delay <= CHUNK_TIME_TOLERANCE * max_seconds:
                return action
        if not decoding:
            return None
        adapter = min((r.adapter for r in decoding), key=lambda a: self._last_turns.get(a, -1))
        return Decode(tuple(request for request in decoding if request.adapter is adapter))

    def record_forward(self, action: ForwardAction, running: list[Request]) -> None:
        """Update the delay of decodes; call this before the action's requests are updated."""
        if isinstance(action, Decode):
            for adapter in {request.adapter for request in action.requests}:
                self._decode_delays_s[adapter] = 0.0
                self._last_turns[adapter] = self._num_decodes
            self._num_decodes += 1
            return
        self._last_was_oldest = not self._last_was_oldest
        seconds = self._predict_chunk(action)
        decoding = {other.adapter for other in running if other.is_decoding and other.is_active}
        self._decode_delays_s = {a: self._decode_delays_s.get(a, 0.0) + seconds for a in decoding}

    def _choose_prefill(self, prefilling: list[Request]) -> Request:
        """Return, by turns, the oldest prompt and the one with the fewest tokens left."""
        prefilling = sorted(prefilling, key=lambda request: request.number)
        if not self._last_was_oldest:
            return prefilling[0]
        return min(prefilling, key=lambda request: request.num_tokens_left)

    def _make_chunk(self, request: Request, max_seconds: float) -> PromptAction:
        """Return the next forward of a prompt, or of the second pass over it.

        An image is encoded before the chunk that needs its features.
        """
        num_computed, repetition = request.num_computed_tokens, request.repetition
        if request.is_computed:
            assert repetition is not None
            position, end = repetition.position, repetition.chunk_end
            return Repeat(request, self.choose_chunk(position, end, max_seconds), position)
        stops = [stop for stop in request.checkpoint_positions if stop > num_computed]
        stop = min([request.num_prompt_tokens, *stops])
        end = num_computed + self.choose_chunk(num_computed, stop, max_seconds)
        end = request.layout.fit_chunk_end(num_computed, end)
        if (image := request.find_unencoded_image(end)) is not None:
            return EncodeImage(request, image)
        return Prefill(request, end - num_computed)

    def _predict_chunk(self, action: PromptAction) -> float:
        if isinstance(action, EncodeImage):
            return self._seconds_per_image_token * action.image.num_tokens
        num_computed = action.request.num_computed_tokens
        position = action.position if isinstance(action, Repeat) else num_computed
        return self.predict_seconds(action.count, position)

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

    def record_image_time(self, num_tokens: int, seconds: float) -> None:
        """Record that an image of `num_tokens` tokens was encoded in `seconds`."""
        self._seconds_per_image_token = seconds / num_tokens

    def record_time(self, count: int, num_computed: int, seconds: float) -> None:
        """Add a measured chunk to the fit.

        Its features are divided by its seconds, so that the fit minimizes relative errors.
        """
        row = _make_features(count, num_computed) / max(seconds, 1e-9)
        self._normal_matrix = TIMING_DECAY * self._normal_matrix + np.outer(row, row)
        self._normal_vector = TIMING_DECAY * self._normal_vector + row


def _make_features(count: int, num_computed: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([1.0, count, count * (num_computed + count / 2)])
