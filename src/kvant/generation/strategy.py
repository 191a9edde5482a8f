"""How a loop uses its memory: what is kept, what is computed anew, and who makes room.

An adaptive memory stays under a budget: before it would pass it, it is stored smaller.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Protocol, TypeVar

from kvant.codecs import Affine, Codebook, Fp8
from kvant.contracts import Codec, Retention
from kvant.errors import CacheError
from kvant.generation.decoder import Memory
from kvant.generation.settings import check_strategy
from kvant.recipes import CacheSpec, attention_in
from kvant.retention import WINDOW_SINKS, Window
from kvant.sizes import as_bytes, format_size
from kvant.spec import words

T = TypeVar("T")
Sizes = Callable[[CacheSpec], float]  # bytes by a spec; infinite where the rows cannot have it
log = logging.getLogger("kvant")

LADDER = (Affine(8, group=64), Affine(4, group=32))  # what affine8 and affine4 mean in a spec
RAW = 16  # bits, more than any step has
NARROWEST = 64  # tokens: a window below this is no memory


@dataclass
class Adaptive:
    """Keep everything, in at most `budget` bytes."""

    budget: int
    _told: bool = field(default=False, init=False, repr=False, compare=False)
    _stuck: Any = field(default=None, init=False, repr=False, compare=False)  # no step helps there

    def remembers(self, length: int) -> bool:
        return True

    def first(self, chunk: int) -> int:
        return 1

    def make_room(self, memory: Memory, coming: int) -> None:
        need = memory.nbytes_after(coming)
        if need <= self.budget or (memory.spec, need) == self._stuck:
            return
        step = self._step(memory, coming, need)
        if step is not None:
            self._take(memory, step)
            need = memory.nbytes_after(coming)
        if need > self.budget:
            self._stuck = (memory.spec, need)
            self._tell(memory, coming, need)

    def _step(self, memory: Memory, coming: int, need: int) -> CacheSpec | None:
        """The nearest that fits; where none does, the smallest, if it is smaller at all."""

        def nbytes(spec: CacheSpec) -> float:
            try:
                return memory.nbytes_after(coming, spec)
            except (CacheError, ValueError):  # a format that these rows cannot have
                return math.inf

        whole = formats_below(memory.spec)
        for spec in whole:
            if nbytes(spec) <= self.budget:
                return spec
        forms, top = [*whole, memory.spec], _top(memory.spec, memory.held + coming)
        widest = [(self._widest(form, top, nbytes), form) for form in forms]
        window, form = max(widest, key=itemgetter(0))  # of equal windows, the one with more bits
        if window:
            return narrowed(form, window)
        narrowest = [narrowed(form, NARROWEST) for form in forms if top > NARROWEST]
        smallest = min([*whole, *narrowest], key=nbytes, default=None)
        return smallest if smallest is not None and nbytes(smallest) < need else None

    def _widest(self, form: CacheSpec, top: int, nbytes: Sizes) -> int:
        """The window below `top` that leaves least of the budget; 0 where none fits."""
        windows = range(NARROWEST, top)
        fitting = bisect_right(windows, float(self.budget), key=lambda w: nbytes(narrowed(form, w)))
        return windows[fitting - 1] if fitting else 0

    def _take(self, memory: Memory, step: CacheSpec) -> None:
        before = memory.nbytes
        memory.recode(step)
        log.warning(
            "%s of %s: %d tokens are stored as %s from now on, in %s",
            *(format_size(before), format_size(self.budget), memory.length),
            *(words(memory.spec), format_size(memory.nbytes)),
        )

    def _tell(self, memory: Memory, coming: int, need: int) -> None:
        """That the budget cannot be met; once, or it would be said at every token."""
        if not self._told:
            log.warning(
                "a budget of %s cannot be met: %d tokens take %s as %s, and no step makes it less",
                *(format_size(self.budget), memory.length + coming),
                *(format_size(need), words(memory.spec) or "a state"),
            )
        self._told = True


def formats_below(spec: CacheSpec) -> list[CacheSpec]:
    """What has fewer bits than a spec and keeps all that it keeps, the nearest first."""
    return [form for form in _distinct(_lowered(spec, step) for step in LADDER) if form != spec]


def _top(spec: CacheSpec, coming: int) -> int:
    """What a window has to be below: the widest of a layer, and the rows that there will be.

    The narrowest is one of few rows too, since memory is taken for more of them than there are.
    """
    widest = max((layer.width for layer in attention_in(*spec.layers)), default=0)
    return int(min(widest, max(coming, NARROWEST + 1)))


def _lowered(spec: CacheSpec, step: Affine) -> CacheSpec:
    """Each attention layer with codecs of at most those bits, in the frames that they have."""

    def lower(codec: Codec) -> Codec:
        return replace(step, frame=codec.frame) if _bits(codec) > step.bits else codec

    return spec.changed(
        lambda layer: replace(layer, keys=lower(layer.keys), values=lower(layer.values))
    )


def _bits(codec: Codec) -> int:
    """0 for codecs of others: nobody knows what is below them."""
    if isinstance(codec, Affine | Codebook):
        return codec.bits
    if isinstance(codec, Fp8):
        return 8
    return RAW if codec.exact else 0


def narrowed(spec: CacheSpec, window: int) -> CacheSpec:
    """Each attention layer within a window.

    One that is there keeps its sinks: others are gone, or the model does not see them.
    """

    def narrow(rule: Retention) -> Retention:
        if rule.window is None:
            return Window(window, max(rule.sinks, WINDOW_SINKS))
        return rule if rule.window <= window else Window(window, rule.sinks)

    return spec.changed(lambda layer: replace(layer, retention=narrow(layer.retention)))


def _distinct(things: Iterable[T]) -> list[T]:
    seen: list[T] = []
    for thing in things:
        if thing not in seen:
            seen.append(thing)
    return seen


class Strategy(Protocol):
    """How a loop uses a memory; it changes no token where the memory is exact."""

    def remembers(self, length: int) -> bool:
        """Is a sequence of so many tokens kept? What is kept once stays so as it grows."""

    def first(self, chunk: int) -> int:
        """How many tokens are read first, of which at most so many go into a forward."""

    def make_room(self, memory: Memory, coming: int) -> None:
        """Make room for so many tokens, if need be: before every forward, and after the first."""


@dataclass(frozen=True)
class Always:
    """Keep everything."""

    def remembers(self, length: int) -> bool:
        return True

    def first(self, chunk: int) -> int:
        return chunk

    def make_room(self, memory: Memory, coming: int) -> None: ...


@dataclass(frozen=True)
class Disabled:
    """Compute everything anew: slow, and the reference for all others."""

    def remembers(self, length: int) -> bool:
        return False

    def first(self, chunk: int) -> int:
        return chunk

    def make_room(self, memory: Memory, coming: int) -> None: ...


@dataclass(frozen=True)
class Long:
    """Keep only what is longer than `threshold` tokens."""

    threshold: int = 512

    def remembers(self, length: int) -> bool:
        return length > self.threshold

    def first(self, chunk: int) -> int:
        return chunk

    def make_room(self, memory: Memory, coming: int) -> None: ...


ALWAYS = Always()


def strategy_of(name: str, threshold: int = 512, budget: int | str | None = None) -> Strategy:
    """The strategy of that name; the numbers are those of `long` and of `adaptive`: 64MiB too."""
    check_strategy(name, threshold, budget)
    if budget is not None:
        return Adaptive(as_bytes(budget))
    made: dict[str, Strategy] = {
        "always": ALWAYS,
        "disabled": Disabled(),
        "long": Long(threshold),
    }
    return made[name]
