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
from kvant.generation.decoder import SequenceCache
from kvant.generation.settings import check_strategy
from kvant.recipes import CacheSpec, iterate_attention
from kvant.retention import DEFAULT_WINDOW_SINKS, Window
from kvant.sizes import as_bytes, format_size
from kvant.spec import describe_spec

T = TypeVar("T")
SpecSizer = Callable[[CacheSpec], float]  # bytes by a spec; infinite where the rows cannot have it
log = logging.getLogger("kvant")

CODEC_LADDER = (Affine(8, group=64), Affine(4, group=32))  # what affine8 and affine4 mean in a spec
RAW_BITS = 16  # bits, more than any step has
MIN_WINDOW = 64  # tokens: a window below this is no memory


@dataclass
class AdaptiveStrategy:
    """Keep everything, in at most `budget` bytes."""

    budget: int
    _warned: bool = field(default=False, init=False, repr=False, compare=False)
    _unreachable: Any = field(
        default=None, init=False, repr=False, compare=False
    )  # no step helps there

    def should_cache(self, num_tokens: int) -> bool:
        return True

    def choose_first_chunk(self, chunk_size: int) -> int:
        return 1

    def make_room(self, cache: SequenceCache, coming: int) -> None:
        need = cache.nbytes_after(coming)
        if need <= self.budget or (cache.spec, need) == self._unreachable:
            return
        step = self._choose_spec(cache, coming, need)
        if step is not None:
            self._recode(cache, step)
            need = cache.nbytes_after(coming)
        if need > self.budget:
            self._unreachable = (cache.spec, need)
            self._warn_over_budget(cache, coming, need)

    def _choose_spec(
        self, cache: SequenceCache, coming: int, needed_nbytes: int
    ) -> CacheSpec | None:
        """The nearest that fits; where none does, the smallest, if it is smaller at all."""

        def measure_nbytes(spec: CacheSpec) -> float:
            try:
                return cache.nbytes_after(coming, spec)
            except (CacheError, ValueError):  # a format that these rows cannot have
                return math.inf

        whole = list_smaller_formats(cache.spec)
        for spec in whole:
            if measure_nbytes(spec) <= self.budget:
                return spec
        forms, top = [*whole, cache.spec], _find_window_limit(cache.spec, cache.num_rows + coming)
        widest = [(self._find_widest_window(form, top, measure_nbytes), form) for form in forms]
        window, form = max(widest, key=itemgetter(0))  # of equal windows, the one with more bits
        if window:
            return limit_window(form, window)
        narrowest = [limit_window(form, MIN_WINDOW) for form in forms if top > MIN_WINDOW]
        smallest = min([*whole, *narrowest], key=measure_nbytes, default=None)
        return (
            smallest if smallest is not None and measure_nbytes(smallest) < needed_nbytes else None
        )

    def _find_widest_window(self, spec: CacheSpec, limit: int, measure: SpecSizer) -> int:
        """The window below `top` that leaves least of the budget; 0 where none fits."""
        windows = range(MIN_WINDOW, limit)
        fitting = bisect_right(
            windows, float(self.budget), key=lambda w: measure(limit_window(spec, w))
        )
        return windows[fitting - 1] if fitting else 0

    def _recode(self, cache: SequenceCache, spec: CacheSpec) -> None:
        before = cache.nbytes
        cache.recode(spec)
        log.warning(
            "%s of %s: %d tokens are stored as %s from now on, in %s",
            *(format_size(before), format_size(self.budget), cache.length),
            *(describe_spec(cache.spec), format_size(cache.nbytes)),
        )

    def _warn_over_budget(self, cache: SequenceCache, coming: int, needed_nbytes: int) -> None:
        """That the budget cannot be met; once, or it would be said at every token."""
        if not self._warned:
            log.warning(
                "a budget of %s cannot be met: %d tokens take %s as %s, and no step makes it less",
                *(format_size(self.budget), cache.length + coming),
                *(format_size(needed_nbytes), describe_spec(cache.spec) or "a state"),
            )
        self._warned = True


def list_smaller_formats(spec: CacheSpec) -> list[CacheSpec]:
    """What has fewer bits than a spec and keeps all that it keeps, the nearest first."""
    return [
        form
        for form in _deduplicate(_lower_codecs(spec, step) for step in CODEC_LADDER)
        if form != spec
    ]


def _find_window_limit(spec: CacheSpec, coming: int) -> int:
    """What a window has to be below: the widest of a layer, and the rows that there will be.

    The narrowest is one of few rows too, since memory is taken for more of them than there are.
    """
    widest = max((layer.effective_window for layer in iterate_attention(*spec.layers)), default=0)
    return int(min(widest, max(coming, MIN_WINDOW + 1)))


def _lower_codecs(spec: CacheSpec, target: Affine) -> CacheSpec:
    """Each attention layer with codecs of at most those bits, in the frames that they have."""

    def lower_codec(codec: Codec) -> Codec:
        return replace(target, frame=codec.frame) if _get_bits(codec) > target.bits else codec

    return spec.map_layers(
        lambda layer: replace(layer, keys=lower_codec(layer.keys), values=lower_codec(layer.values))
    )


def _get_bits(codec: Codec) -> int:
    """0 for codecs of others: nobody knows what is below them."""
    if isinstance(codec, Affine | Codebook):
        return codec.bits
    if isinstance(codec, Fp8):
        return 8
    return RAW_BITS if codec.exact else 0


def limit_window(spec: CacheSpec, window: int) -> CacheSpec:
    """Each attention layer within a window.

    One that is there keeps its sinks: others are gone, or the model does not see them.
    """

    def narrow_retention(rule: Retention) -> Retention:
        if rule.window is None:
            return Window(window, max(rule.sinks, DEFAULT_WINDOW_SINKS))
        return rule if rule.window <= window else Window(window, rule.sinks)

    return spec.map_layers(
        lambda layer: replace(layer, retention=narrow_retention(layer.retention))
    )


def _deduplicate(items: Iterable[T]) -> list[T]:
    seen: list[T] = []
    for thing in items:
        if thing not in seen:
            seen.append(thing)
    return seen


class Strategy(Protocol):
    """How a loop uses a memory; it changes no token where the memory is exact."""

    def should_cache(self, num_tokens: int) -> bool:
        """Is a sequence of so many tokens kept? What is kept once stays so as it grows."""

    def choose_first_chunk(self, chunk_size: int) -> int:
        """How many tokens are read first, of which at most so many go into a forward."""

    def make_room(self, cache: SequenceCache, coming: int) -> None:
        """Make room for so many tokens, if need be: before every forward, and after the first."""


@dataclass(frozen=True)
class AlwaysStrategy:
    """Keep everything."""

    def should_cache(self, num_tokens: int) -> bool:
        return True

    def choose_first_chunk(self, chunk_size: int) -> int:
        return chunk_size

    def make_room(self, cache: SequenceCache, coming: int) -> None: ...


@dataclass(frozen=True)
class DisabledStrategy:
    """Compute everything anew: slow, and the reference for all others."""

    def should_cache(self, num_tokens: int) -> bool:
        return False

    def choose_first_chunk(self, chunk_size: int) -> int:
        return chunk_size

    def make_room(self, cache: SequenceCache, coming: int) -> None: ...


@dataclass(frozen=True)
class LongStrategy:
    """Keep only what is longer than `threshold` tokens."""

    threshold: int = 512

    def should_cache(self, num_tokens: int) -> bool:
        return num_tokens > self.threshold

    def choose_first_chunk(self, chunk_size: int) -> int:
        return chunk_size

    def make_room(self, cache: SequenceCache, coming: int) -> None: ...


ALWAYS = AlwaysStrategy()


def make_strategy(name: str, threshold: int = 512, budget: int | str | None = None) -> Strategy:
    """The strategy of that name; the numbers are those of `long` and of `adaptive`: 64MiB too."""
    check_strategy(name, threshold, budget)
    if budget is not None:
        return AdaptiveStrategy(as_bytes(budget))
    made: dict[str, Strategy] = {
        "always": ALWAYS,
        "disabled": DisabledStrategy(),
        "long": LongStrategy(threshold),
    }
    return made[name]
