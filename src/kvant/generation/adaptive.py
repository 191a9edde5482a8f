"""A memory that stays under a budget: as it nears it, it is stored ever smaller.

First in 8 bits, then in 4, then with a window that is halved for as long as it takes; the first
tokens stay, since attention leans on them. Every step down is said in the log and counted by the
memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from kvant.generation.decoder import Memory
from kvant.layers import attending
from kvant.recipes import CacheSpec, GroupSpec, LayerSpec
from kvant.sizes import format_size
from kvant.spec import spelled

log = logging.getLogger("kvant")

LADDER = ("raw", "affine8", "affine4")
NEAR = 16  # the last sixteenth of a budget is for what one forward adds
SINKS = 4
NARROWEST = 64  # tokens: a window below this is no memory


@dataclass(frozen=True)
class Adaptive:
    """Keep everything, in at most `budget` bytes."""

    budget: int

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(f"budget={self.budget}: 1 byte or more is needed")

    def remembers(self, length: int) -> bool:
        return True

    def relieve(self, memory: Memory) -> None:
        most = self.budget - self.budget // NEAR
        if memory.nbytes <= most or not attending(memory.spec):
            return
        for spec in steps_down(memory.spec, memory.held):
            before = memory.nbytes
            memory.recode(spec)
            log.warning(
                "%s of %s: %d tokens are stored as %s from now on, in %s",
                *(format_size(before), format_size(self.budget), memory.length),
                *(spec, format_size(memory.nbytes)),
            )
            if memory.nbytes <= most:
                return


def steps_down(spec: CacheSpec, held: int) -> Iterator[str]:
    """What is smaller than a spec, the nearest first."""
    layer = next(_attention(spec))
    keys, values = spelled(layer.keys), spelled(layer.values)
    form, window = f"{keys}/{values}", layer.retention.window
    if keys == values and keys in LADDER and window is None:
        for form in LADDER[LADDER.index(keys) + 1 :]:
            yield form
    window = held if window is None else min(window, held)
    while (window := window // 2) >= NARROWEST:
        yield f"{form},window={window},sinks={SINKS}"


def _attention(spec: CacheSpec) -> Iterator[LayerSpec]:
    for recipe in spec.layers:
        parts = [part for _, part in recipe.parts] if isinstance(recipe, GroupSpec) else [recipe]
        yield from (part for part in parts if isinstance(part, LayerSpec))
