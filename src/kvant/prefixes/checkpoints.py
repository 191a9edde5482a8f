"""Plan the lengths at which a prompt is inserted into the prefixes while it is prefilled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvant.prefixes.keys import PAGE_TOKENS
from kvant.prefixes.prefix_store import MIN_TAIL_DIVISOR
from kvant.recipes import CacheSpec, GroupSpec, Recipe, RecurrentSpec, iterate_attention

CHECKPOINT_INTERVAL = 2048  # tokens between checkpoints of a long prompt
MIN_LONG_PROMPT = 4096  # a prompt with more tokens to prefill is long
MAX_INTERVAL_CHECKPOINTS = 4  # of a long prompt: the last ones


class CheckpointPlanner:
    """Plan the checkpoints of prompts for one spec."""

    def __init__(self, spec: CacheSpec, alignment: int | None, *, has_store: bool) -> None:
        """Checkpoints are multiples of `alignment`; None: anywhere."""
        self._alignment = alignment
        self._pages_suffice = pages_suffice(spec)
        self._page_size = max(
            [PAGE_TOKENS, *(layer.page for layer in iterate_attention(*spec.layers))]
        )
        self._stores_tails = has_store and alignment is None and not _has_recurrent(spec)

    def plan(
        self, count: int, num_cached: int, branch_points: Sequence[int], matched_branch: int
    ) -> list[int]:
        """Return the checkpoints of a prompt of `count` tokens, in order.

        `branch_points` are lengths at which other prompts may diverge, and `matched_branch` is one
        at which a cached prefix does; 0: none. If pages suffice, a prompt can be resumed at every
        page. With a store, the end of the prompt is added if its partial last page is a large part
        of it. The tail is then stored without the reply, and another process can restore it for
        the same prompt.
        """
        has_long_tail = (count - 1) % self._page_size * MIN_TAIL_DIVISOR > count
        # Each request prefills at least one token. A full last page cannot be rewound by one.
        end = count if count % self._page_size else count - 1
        stores_tail = self._stores_tails and has_long_tail and end > num_cached
        ends = {end} if stores_tail else set[int]()
        if self._pages_suffice:
            return sorted(ends)
        points = {matched_branch, (count - 1) // PAGE_TOKENS * PAGE_TOKENS, *branch_points}
        if count - num_cached > MIN_LONG_PROMPT:
            intervals = range(CHECKPOINT_INTERVAL, count, CHECKPOINT_INTERVAL)
            points |= set(intervals[-MAX_INTERVAL_CHECKPOINTS:])
        if self._alignment is not None:
            points = {point // self._alignment * self._alignment for point in points}
        return sorted({point for point in points if num_cached < point < count} | ends)


def pages_suffice(spec: CacheSpec) -> bool:
    """Return whether full pages are enough to resume a prefix.

    They are not if a layer has a window, a recurrent state, dense rows after the sealed ones, or
    sinks in open pages.
    """
    return not _has_recurrent(spec) and all(
        not (layer.retention.window or layer.paging.tail or layer.dense_until)
        and not (layer.seals and layer.retention.sinks)
        for layer in iterate_attention(*spec.layers)
    )


def _has_recurrent(spec: CacheSpec) -> bool:
    return any(isinstance(recipe, RecurrentSpec) for recipe in _iterate_recipes(spec))


def _iterate_recipes(spec: CacheSpec) -> Iterator[Recipe]:
    """Yield the recipes of all layers, groups expanded."""
    for recipe in spec.layers:
        if isinstance(recipe, GroupSpec):
            yield from (part for _, part in recipe.parts)
        else:
            yield recipe
