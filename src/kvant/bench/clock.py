"""How long calls take: by the clock of this machine, or by events in the stream of a GPU.

A GPU works behind the host's back. Where calls need nothing of each other, it is held until a whole
turn of them is queued: then events tell what the GPU does, and not how fast Python asks for it.
Where a call needs what the one before gave, it begins when that is done: then they tell what a
caller waits for. Knows no call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Call = Callable[[], Any]
HOLD = 50_000_000  # cycles, 25 ms of a GPU: longer than Python takes for a turn of calls


@dataclass(frozen=True)
class Lap:
    """What one call took."""

    host: float  # seconds until it returned
    events: tuple[Any, Any] | None = None  # before and after it, in the stream of a GPU

    @property
    def seconds(self) -> float:
        """Waits for the GPU: to be asked when all laps were run."""
        if self.events is None:
            return self.host
        begin, end = self.events
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class Clock(Protocol):
    def turn(self) -> None:
        """Calls follow that need nothing of each other."""

    def settle(self) -> None:
        """The call that follows begins when all before it is done."""

    def lap(self, call: Call) -> Lap: ...
    def beside(self, laps: Sequence[Lap]) -> dict[str, float]:
        """What else it tells of laps."""


class Wall:
    """The clock of this machine, where a call is done when it returns."""

    def turn(self) -> None: ...
    def settle(self) -> None: ...

    def lap(self, call: Call) -> Lap:
        begin = time.perf_counter()
        call()
        return Lap(time.perf_counter() - begin)

    def beside(self, laps: Sequence[Lap]) -> dict[str, float]:
        return {}


class Events:
    """The stream of a GPU."""

    def turn(self) -> None:
        torch.cuda.synchronize()  # or the queue, of about a thousand launches, would fill up
        torch.cuda._sleep(HOLD)  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        torch.cuda.synchronize()

    def lap(self, call: Call) -> Lap:
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        asked = time.perf_counter()
        begin.record()
        call()
        end.record()
        return Lap(time.perf_counter() - asked, (begin, end))

    def beside(self, laps: Sequence[Lap]) -> dict[str, float]:
        return {"host_ms": statistics.median(lap.host for lap in laps) * 1e3}
