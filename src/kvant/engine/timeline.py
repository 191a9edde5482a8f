"""When the phases of a request began and ended, as the engine's thread measures them.

queue            |--------------------------|
prefix_lookup        |--|              |-|         again where prefixes were added meanwhile
store                   |------------|
prefill                                     |------------|
decode                                                   |----------------|
              submit                   first chunk  first token          end
"""

from __future__ import annotations

import time
from collections import deque
from typing import Literal, NamedTuple

PhaseName = Literal["queue", "prefix_lookup", "store", "prefill", "decode"]

MAX_PHASES = 16  # the newest: a prompt that waits for memory is looked up again and again


class Phase(NamedTuple):
    name: PhaseName
    start_ns: int  # of time.monotonic_ns()
    end_ns: int


class Timeline:
    """The phases of a request; only the engine's thread writes to it, until the request ends."""

    def __init__(self) -> None:
        """Begin with the queue."""
        self.num_swaps = 0  # times that the request was swapped out
        self._open: dict[PhaseName, int] = {}  # start of each phase that has not ended
        self._ended = deque[Phase](maxlen=MAX_PHASES)
        self.begin_phase("queue")

    @property
    def phases(self) -> list[Phase]:
        """The phases that ended, in the order of their starts."""
        return sorted(self._ended, key=lambda phase: phase.start_ns)

    def begin_phase(self, name: PhaseName) -> None:
        self._open[name] = time.monotonic_ns()

    def end_phase(self, name: PhaseName) -> None:
        """End a phase, if it has begun and not ended."""
        if (start_ns := self._open.pop(name, None)) is not None:
            self._ended.append(Phase(name, start_ns, time.monotonic_ns()))

    def end_all_phases(self) -> None:
        """End the phases that are open when the request ends."""
        for name in [*self._open]:
            self.end_phase(name)
