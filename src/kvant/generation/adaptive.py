"""A memory that stays under a budget: before it would pass it, it is stored smaller.

First in 8 bits, then in 4, then in one of these with a window that is halved for as long as it
takes; the first tokens stay, since attention leans on them. What a step would take is known before
it is made, the tokens that come next included: so the nearest one that fits is made, and none that
does not make it smaller (in 4 bits the last 128 rows stay dense, which a short text does not earn
back). Of each recipe a step changes the codecs and the window only; a tail is never cut, for in few
bits it is most of what keeps quality. Every step is said in the log and counted by the memory.

Before the first forward nobody knows how large rows are: so a token goes first, by itself, which
takes one growth of memory (`step` rows a layer) whatever the budget. While a step is made there are
old and new rows, since it is made of all layers or of none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from kvant.codecs import Affine, Codebook, Fp8
from kvant.contracts import Codec, Retention
from kvant.errors import CacheError
from kvant.generation.decoder import Memory
from kvant.recipes import CacheSpec, attention_in
from kvant.retention import Window
from kvant.sizes import format_size
from kvant.spec import words

T = TypeVar("T")
log = logging.getLogger("kvant")

LADDER = (Affine(8, group=64), Affine(4, group=32))  # what affine8 and affine4 mean in a spec
RAW = 16  # bits, more than any step has
SINKS = 4  # of a window where there was none
NARROWEST = 64  # tokens: a window below this is no memory


@dataclass
class Adaptive:
    """Keep everything, in at most `budget` bytes."""

    budget: int
    _told: bool = field(default=False, init=False, repr=False, compare=False)
    _stuck: Any = field(default=None, init=False, repr=False, compare=False)  # no step helps there

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(f"budget={self.budget}: 1 byte or more is needed")

    def remembers(self, length: int) -> bool:
        return True

    def first(self, chunk: int) -> int:
        return 1

    def relieve(self, memory: Memory, coming: int) -> None:
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
        smallest = None
        for spec in steps_down(memory.spec, memory.held):
            try:
                nbytes = memory.nbytes_after(coming, spec)
            except (CacheError, ValueError):  # a format that these rows cannot have
                continue
            if nbytes < need:
                smallest, need = spec, nbytes
            if nbytes <= self.budget:
                break
        return smallest

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


def steps_down(spec: CacheSpec, held: int) -> Iterator[CacheSpec]:
    """What may be smaller than a spec, the nearest first."""
    lowered = [_lowered(spec, step) for step in LADDER]
    yield from (form for form in _distinct(lowered) if form != spec)
    for window in _windows(spec, held):
        narrowed = (_narrowed(form, window) for form in [*lowered, spec])
        yield from (form for form in _distinct(narrowed) if form != spec)


def _windows(spec: CacheSpec, held: int) -> Iterator[int]:
    """Narrower than the widest layer: halves of what is held."""
    widest = max((layer.width for layer in attention_in(*spec.layers)), default=0)
    window = int(min(widest, held))
    while (window := window // 2) > NARROWEST:
        yield window
    if widest > NARROWEST:
        yield NARROWEST


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


def _narrowed(spec: CacheSpec, window: int) -> CacheSpec:
    """Each attention layer within a window.

    One that is there keeps its sinks: others are gone, or the model does not see them.
    """

    def narrow(rule: Retention) -> Retention:
        if rule.window is None:
            return Window(window, max(rule.sinks, SINKS))
        return rule if rule.window <= window else Window(window, rule.sinks)

    return spec.changed(lambda layer: replace(layer, retention=narrow(layer.retention)))


def _distinct(things: Iterable[T]) -> list[T]:
    seen: list[T] = []
    for thing in things:
        if thing not in seen:
            seen.append(thing)
    return seen
