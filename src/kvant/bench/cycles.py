"""Count the cycles that attention of one token takes for a further row of a key head, in the cache.

One call of the library attends many times, so Python's time does not count. The cost of a call is
subtracted: the figure is the difference of two lengths. The clock is measured in turn with the
formats, by additions that each wait for the previous one. `cycles` is of the shortest times, which
other load on the machine affects least; `median` is of the medians.
"""

from __future__ import annotations

from ctypes import c_int64
from functools import partial

import torch
from torch import Tensor

from kvant.attention import attend
from kvant.bench.harness import TimedCall, time_in_turn
from kvant.cache import Cache
from kvant.contracts import View
from kvant.native import get_library
from kvant.replay.capture import capture_forward

ROWS = (512, 1024)
CALLS = 64
CLOCK_CYCLES = 1_000_000
CLOCK = ("clock", 0)


def count_cycles(
    names: list[str], *, group: int, dim: int, repeats: int
) -> list[dict[str, float | str]]:
    """Return a row for each format."""
    functions = get_library().functions
    if functions is None:
        raise ValueError(f"--cycles: {get_library().reason}")
    q = torch.randn(1, group, 1, dim).bfloat16()
    calls: dict[tuple[str, int], TimedCall] = {
        CLOCK: partial(functions.kvant_spin, c_int64(CLOCK_CYCLES))
    }
    owners = []  # of the memory that the calls read
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for length in ROWS:
            keys, values = torch.randn(2, 1, 1, length, dim).bfloat16()
            for name in names:
                cache = Cache(1, f"{name},tail=0,prefill=stored")
                view = cache[0].append(keys, values)
                calls[name, length] = repeat_natively(q, view)
                owners.append((cache, view))
        laps = time_in_turn(calls, repeats, "cycles")
    finally:
        torch.set_num_threads(threads)
    shortest = {key: min(key_laps.seconds) for key, key_laps in laps.items()}
    medians = {key: key_laps.median for key, key_laps in laps.items()}
    return [
        {
            "way": name,
            "ghz": CLOCK_CYCLES / shortest[CLOCK] / 1e9,
            "cycles": count_row_cycles(shortest, name),
            "median": count_row_cycles(medians, name),
        }
        for name in names
    ]


def count_row_cycles(seconds: dict[tuple[str, int], float], name: str) -> float:
    """Return the cycles of a row by which the second length is longer."""
    first, second = ROWS
    more = (seconds[name, second] - seconds[name, first]) / CALLS
    return more / seconds[CLOCK] * CLOCK_CYCLES / (second - first)


def repeat_natively(q: Tensor, view: View) -> TimedCall:
    """Return a call that attends many times in one call of the library."""

    def attend_often(q: Tensor) -> Tensor:
        outputs: list[Tensor] = [attend(q, view, backend="native") for _ in range(CALLS)]
        return outputs[-1]

    return partial(capture_forward(attend_often, q), q)
