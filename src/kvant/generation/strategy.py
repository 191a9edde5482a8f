"""Keep the cache of one sequence within a budget of bytes.

Before a forward would exceed the budget, the cache is recoded to a smaller spec.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import itemgetter

from kvant.cache import Cache
from kvant.codecs import Affine
from kvant.contracts import Codec
from kvant.errors import CacheError
from kvant.hf import TransformersCache
from kvant.platform.sizes import format_size
from kvant.recipes import CacheSpec, iterate_attention
from kvant.retention import DEFAULT_WINDOW_SINKS, Retention, Window
from kvant.spec import describe_spec

SequenceCache = Cache | TransformersCache  # of one sequence
SpecSizer = Callable[[CacheSpec], float]  # bytes under a spec; infinity if it cannot store the rows
log = logging.getLogger("kvant")

# affine8 and affine4 of the spec language.
CODEC_LADDER = (Affine(8, group=64), Affine(4, group=32))
RAW_BITS = 16  # more bits than any codec of the ladder
MIN_WINDOW = 64  # tokens; a smaller window is not useful


@dataclass
class AdaptiveStrategy:
    """Recode the cache to smaller specs so that it stays within `budget` bytes."""

    budget: int
    _warned: bool = field(default=False, init=False, repr=False, compare=False)
    # Spec and bytes for which no smaller spec was found.
    _unreachable: tuple[CacheSpec, int] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def make_room(self, cache: SequenceCache, coming: int) -> None:
        """Recode the cache if `coming` more tokens would exceed the budget.

        Call this before each forward. Call it after the first one, too, with `coming` = 0: before
        it, the size of rows is unknown.
        """
        needed_nbytes = cache.nbytes_after(coming)
        if needed_nbytes <= self.budget or (cache.spec, needed_nbytes) == self._unreachable:
            return
        smaller_spec = self._choose_spec(cache, coming, needed_nbytes)
        if smaller_spec is not None:
            self._recode(cache, smaller_spec)
            needed_nbytes = cache.nbytes_after(coming)
        if needed_nbytes > self.budget:
            self._unreachable = (cache.spec, needed_nbytes)
            self._warn_over_budget(cache, coming, needed_nbytes)

    def _choose_spec(
        self, cache: SequenceCache, coming: int, needed_nbytes: int
    ) -> CacheSpec | None:
        """Return the spec that fits and changes least; if none fits, the smallest if it is smaller.

        Smaller formats are tried first, then the widest window in any of the formats.
        """

        def measure_nbytes(spec: CacheSpec) -> float:
            try:
                return cache.nbytes_after(coming, spec)
            except (CacheError, ValueError):  # a format that does not fit these rows
                return math.inf

        formats = list_smaller_formats(cache.spec)
        for spec in formats:
            if measure_nbytes(spec) <= self.budget:
                return spec
        specs = [cache.spec, *formats]  # most bits first
        # Dense rows cannot have a narrower window than the model's.
        reads_dense = cache.stats().get("materialized", 0)
        limit = 0 if reads_dense else _find_window_limit(cache.spec, cache.num_rows + coming)
        widest = [(self._find_widest_window(spec, limit, measure_nbytes), spec) for spec in specs]
        window, spec = max(widest, key=itemgetter(0))  # a tie goes to the first
        if window:
            return limit_window(spec, window)
        narrowest = [limit_window(spec, MIN_WINDOW) for spec in specs if limit > MIN_WINDOW]
        smallest = min([*formats, *narrowest], key=measure_nbytes, default=None)
        saves = smallest is not None and measure_nbytes(smallest) < needed_nbytes
        return smallest if saves else None

    def _find_widest_window(self, spec: CacheSpec, limit: int, measure: SpecSizer) -> int:
        """Return the widest window below `limit` that fits the budget; 0 if none does."""
        windows = range(MIN_WINDOW, limit)
        fitting = bisect_right(
            windows, float(self.budget), key=lambda w: measure(limit_window(spec, w))
        )
        return windows[fitting - 1] if fitting else 0

    def _recode(self, cache: SequenceCache, spec: CacheSpec) -> None:
        old_nbytes = cache.nbytes
        cache.recode(spec)
        log.warning(
            "%s of %s: %d tokens are stored as %s from now on, in %s",
            *(format_size(old_nbytes), format_size(self.budget), cache.length),
            *(describe_spec(cache.spec), format_size(cache.nbytes)),
        )

    def _warn_over_budget(self, cache: SequenceCache, coming: int, needed_nbytes: int) -> None:
        """Log, once, that the budget cannot be met."""
        if not self._warned:
            log.warning(
                "a budget of %s cannot be met: %d tokens take %s as %s, and no step makes it less",
                *(format_size(self.budget), cache.length + coming),
                *(format_size(needed_nbytes), describe_spec(cache.spec) or "a state"),
            )
        self._warned = True


def list_smaller_formats(spec: CacheSpec) -> list[CacheSpec]:
    """Return the specs with fewer bits that store the same rows, most bits first."""
    smaller: list[CacheSpec] = []
    for codec in CODEC_LADDER:
        form = _lower_codecs(spec, codec)
        if form not in (spec, *smaller):
            smaller.append(form)
    return smaller


def _find_window_limit(spec: CacheSpec, coming: int) -> int:
    """Return the exclusive upper limit of windows to try.

    A window of all rows, or as wide as the widest existing one, would drop nothing. Even for few
    rows, MIN_WINDOW is tried: allocations are rounded up, so it may save bytes.
    """
    widest = max((layer.effective_window for layer in iterate_attention(*spec.layers)), default=0)
    return int(min(widest, max(coming, MIN_WINDOW + 1)))


def _lower_codecs(spec: CacheSpec, target: Affine) -> CacheSpec:
    """Lower the codecs of all attention layers to at most the target's bits; keep the frames.

    A codec without a form stays: its bits are unknown.
    """

    def lower_codec(codec: Codec) -> Codec:
        bits = RAW_BITS if codec.exact else 0 if codec.form is None else codec.form.bits
        return replace(target, frame=codec.frame) if bits > target.bits else codec

    return spec.map_layers(
        lambda layer: replace(layer, keys=lower_codec(layer.keys), values=lower_codec(layer.values))
    )


def limit_window(spec: CacheSpec, window: int) -> CacheSpec:
    """Limit each attention layer to a window.

    An existing window keeps its sinks: rows between sinks and window are gone or never visible.
    """

    def narrow_retention(rule: Retention) -> Retention:
        if rule.window is None:
            return Window(window, max(rule.sinks, DEFAULT_WINDOW_SINKS))
        return rule if rule.window <= window else Window(window, rule.sinks)

    return spec.map_layers(
        lambda layer: replace(layer, retention=narrow_retention(layer.retention))
    )
