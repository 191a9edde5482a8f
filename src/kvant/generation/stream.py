"""The steps of a reply: computed as they are taken, or all at once for whoever takes them later."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Literal

FinishReason = Literal["stop", "length"]  # an end token or stop string; a limit


@dataclass(frozen=True)
class Step:
    """`text` is what the token adds to what was said before: it may be nothing, or a late part."""

    token: int
    text: str
    logprob: float  # of the token, under the distribution that it was drawn from
    finish_reason: FinishReason | None = None
    drafted: bool = False  # guessed before, and verified together with others


class Stream(Iterator[Step]):
    """An iterator over steps. Who drops it, or closes it, has ended the reply."""

    def __init__(self, steps: Generator[Step, None, None]) -> None:
        self._steps = steps
        self._ready: deque[Step] = deque()  # computed, and not taken yet

    def __next__(self) -> Step:
        return self._ready.popleft() if self._ready else next(self._steps)

    def finish(self) -> None:
        """Compute what is left; it can still be taken."""
        self._ready.extend(self._steps)

    def close(self) -> None:
        """End the reply here, unless it is asked for this from within."""
        if getgeneratorstate(self._steps) != GEN_RUNNING:
            self._steps.close()
