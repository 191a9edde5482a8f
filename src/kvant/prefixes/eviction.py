"""Choose the cached prefixes to evict, one after the other; measure their bytes only once.

Entries that no request uses are evicted first; among equals, that of the least value per byte. A
page of n entries counts as 1/n of its bytes for each. So the eviction of an entry with shared pages
changes the values of other entries, and they are ranked again.

    item      a page, the states of a cache, or the features of an image
    holding   a pair of an item and an entry that holds it

       page 0: entries 0, 1, 2      page 1: entries 0, 1      page 2: entry 2
       without entry 1, page 0 counts as 1/2 for 0 and 2, and page 1 as 1/1 for 0
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvant.cache import Cache
from kvant.cache.reports import CacheUsage, count_state_nbytes, measure_usage
from kvant.page_table import Bools, Ints, expand_ranges
from kvant.prefixes.tree import PrefixEntry, PrefixTree, TreeNode, list_caches
from kvant.vision import ImageFeatures

Floats = NDArray[np.float64]


class EvictionRules(NamedTuple):
    """Which entries may be evicted."""

    include_unwritten: bool = True  # also entries with pending store writes
    include_used: bool = True  # also entries whose pages a request uses
    protected: PrefixEntry | None = None


EVICT_ANY = EvictionRules()


class EvictionOrder:
    """The entries of some trees in the order of their eviction.

    It is valid while nothing else changes the trees. Which pages requests use, and which store
    writes are pending, is read once. The order keeps references to evicted entries: their pages
    stay allocated at least until it is deleted.
    """

    def __init__(self, pools: Sequence[Sequence[PrefixTree]], rules: EvictionRules) -> None:
        """`pools` are the trees over each pool."""
        self._positions = TreePositions([tree for trees in pools for tree in trees])
        self._entries = entries = self._positions.entries
        shares, used, parts = list[float](), list[bool](), list[HoldingPart]()
        for trees in pools:
            begin = len(shares)
            stop = begin + sum(1 for tree in trees for _ in tree)
            caches, owners = list_caches(entries[begin:stop])
            usage = measure_usage(caches)
            # Values of the entries come first, then those of replaced entries with pending writes.
            shares += usage.proportional_nbytes[: stop - begin]
            used += usage.has_outside_users[: stop - begin]
            is_own = np.arange(len(caches)) < stop - begin
            parts += _list_holdings(caches, usage, begin + np.array(owners, np.int64), is_own)
        self._holdings = Holdings([*parts, _list_feature_holdings(entries)])
        self._share_nbytes, self._is_used = np.array(shares), np.array(used, bool)
        self._may_evict = np.array(
            [
                entry is not rules.protected
                and (rules.include_unwritten or not entry.has_unwritten)
                for entry in entries
            ],
            bool,
        )
        self._include_used = rules.include_used
        self._ranking: Iterator[int] | None = None  # the next victims; None: to be ranked again
        now = time.monotonic()
        self._num_uses = np.array([entry.num_uses for entry in entries], np.int64)
        self._ages = np.array([now - entry.last_used for entry in entries], float)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries that are left."""
        return self._holdings.held_nbytes

    def evict(self) -> bool:
        """Remove the next entry from its tree; return False if none may be evicted."""
        if self._ranking is None:
            self._ranking = iter(self._rank())
        if (victim := next(self._ranking, None)) is None:
            return False
        if self._holdings.has_shared_pages(victim):
            self._ranking = None
        self._entries[victim].remove()
        self._may_evict[victim] = False
        self._positions.remove(victim)
        sharing = self._holdings.release(victim)
        np.add.at(self._share_nbytes, sharing.entries, sharing.added_nbytes)
        self._is_used[sharing.entries[sharing.is_used]] = True
        return True

    def _rank(self) -> list[int]:
        """Return the entries that may be evicted, in the order of their present values."""
        may_evict = self._may_evict if self._include_used else self._may_evict & ~self._is_used
        # The tokens that an eviction would lose, weighted by uses and age, per byte.
        values = self._positions.count_lost_tokens() * (1 + self._num_uses) / (1.0 + self._ages)
        values /= np.maximum(self._share_nbytes, 1.0)
        order = np.lexsort((values, self._is_used))
        ranking: list[int] = order[may_evict[order]].tolist()
        return ranking


class HoldingPart(NamedTuple):
    """Some items, and which entries hold them."""

    # By item.
    nbytes: Ints
    has_share: Bools  # a value per byte includes these bytes
    has_users: Bools  # requests hold it as well
    # By holding.
    items: Ints
    entries: Ints
    is_own: Bools  # the entry itself holds it, not the cache of an entry that it replaced


class Sharing(NamedTuple):
    """The holdings of items whose number of holders has changed."""

    entries: Ints
    added_nbytes: Floats  # to the share of the entry
    is_used: Bools  # no other entry holds the item any more, but a request does


class Holdings:
    """The items of all entries; each eviction releases those of an entry."""

    def __init__(self, parts: Sequence[HoldingPart]) -> None:
        sizes = np.array([len(part.nbytes) for part in parts])
        begins = np.cumsum(sizes) - sizes
        parts = [
            part._replace(items=begin + part.items)
            for begin, part in zip(begins.tolist(), parts, strict=True)
        ]
        self._all = items = HoldingPart(*map(np.concatenate, zip(*parts, strict=True)))
        self._num_holders = np.bincount(items.items, minlength=len(items.nbytes))
        self._by_entry, self._by_item = Index(items.entries), Index(items.items)
        self.held_nbytes = int(items.nbytes[self._num_holders > 0].sum())

    def has_shared_pages(self, entry: int) -> bool:
        """Return whether an entry holds pages that another one, or a pending write, holds too."""
        holdings = self._by_entry.find(np.array([entry]))[1]
        items = self._all.items[holdings[self._all.is_own[holdings]]]
        return bool((self._all.has_share[items] & (self._num_holders[items] > 1)).any())

    def release(self, entry: int) -> Sharing:
        """Release the items of an entry; return the holdings of those that others hold, too."""
        everything = self._all
        released = everything.items[self._by_entry.find(np.array([entry]))[1]]
        items = np.unique(released)  # an entry and its pending caches may hold the same
        before = self._num_holders[items]
        np.subtract.at(self._num_holders, released, 1)
        after = self._num_holders[items]
        self.held_nbytes -= int(everything.nbytes[items[after == 0]].sum())
        items, before, after = (numbers[after > 0] for numbers in (items, before, after))
        number, holdings = self._by_item.find(items)
        number, holdings = (x[everything.is_own[holdings]] for x in (number, holdings))
        added = everything.nbytes[items] * everything.has_share[items] * (1 / after - 1 / before)
        is_used = everything.has_users[items] & (after == 1)
        return Sharing(everything.entries[holdings], added[number], is_used[number])


class Index:
    """For each value in an array of non-negative integers, the positions where it occurs."""

    def __init__(self, numbers: Ints) -> None:
        self._order = np.argsort(numbers, kind="stable")
        counts = np.bincount(numbers)
        self._stops = np.cumsum(counts)
        self._starts = self._stops - counts

    def find(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Find the positions at which the values `numbers` occur.

        Return two arrays: for each position, the index of its value in `numbers`, and the position.
        """
        indices, places = expand_ranges(self._starts[numbers], self._stops[numbers])
        return indices, self._order[places]


def _list_holdings(
    caches: Sequence[Cache], usage: CacheUsage, owners: Ints, is_own: Bools
) -> list[HoldingPart]:
    """Return the holdings of the states and the pages of caches.

    `owners` has the entry of each cache; `is_own` is false for that of a replaced entry.
    """
    count = len(caches)
    states = np.array([count_state_nbytes(cache) for cache in caches], np.int64)
    with_share, unused = np.ones(count, bool), np.zeros(count, bool)
    return [
        HoldingPart(states, with_share, unused, np.arange(count), owners, is_own),
        *(
            HoldingPart(
                np.full(len(pool.num_users), pool.nbytes),
                np.ones(len(pool.num_users), bool),
                pool.has_others,
                pool.slots,
                owners[pool.users],
                is_own[pool.users],
            )
            for pool in usage.slot_users
        ),
    ]


def _list_feature_holdings(entries: Sequence[PrefixEntry]) -> HoldingPart:
    """Return the holdings of image features, which values per byte ignore."""
    numbers = dict[ImageFeatures, int]()
    holdings = [
        (numbers.setdefault(features, len(numbers)), number)
        for number, entry in enumerate(entries)
        for features in entry.features.values()
    ]
    items, owners = np.array(holdings, np.int64).reshape(-1, 2).T
    nbytes = np.array([features.nbytes for features in numbers], np.int64)
    none, all_own = np.zeros(len(numbers), bool), np.ones(len(holdings), bool)
    return HoldingPart(nbytes, none, none, items, owners, all_own)


class TreePositions:
    """The entries of some trees, and how many tokens the cache loses with each of them.

    These are the tokens after the nearest entry above in the tree: its base.
    """

    def __init__(self, trees: Sequence[PrefixTree]) -> None:
        numbers = dict[TreeNode, int]()
        self.entries: list[PrefixEntry] = []
        nodes, bases = list[int](), list[int]()
        for tree in trees:
            for entry, base in tree.iterate_with_bases():
                self.entries.append(entry)
                nodes.append(numbers.setdefault(entry.node, len(numbers)))
                bases.append(numbers.setdefault(base, len(numbers)))
        self._lengths = np.array([entry.length for entry in self.entries], np.int64)
        self._is_remaining = np.ones(len(self.entries), bool)
        # By entry, the numbers of its node and of its base.
        self._nodes, self._bases = np.array(nodes, np.int64), np.array(bases, np.int64)
        lengths = [np.array([e.length for e in node.entries], np.int64) for node in numbers]
        self._longest = np.array(list(map(_find_longest, lengths)), np.int64).reshape(-1, 2)

    def count_lost_tokens(self) -> Ints:
        """Return the tokens that the eviction of each entry would lose."""
        longest, second = self._longest[self._bases].T
        # At the root, an entry and its base can be at the same node.
        is_base = (self._nodes == self._bases) & (self._lengths == longest)
        lost: Ints = np.maximum(self._lengths - np.where(is_base, second, longest), 1)
        return lost

    def remove(self, entry: int) -> None:
        """Remove an entry.

        If it was the last one at its node, its base becomes the base of the entries below it.
        """
        self._is_remaining[entry] = False
        node, base = self._nodes[entry], self._bases[entry]
        lengths = self._lengths[self._is_remaining & (self._nodes == node)]
        self._longest[node] = _find_longest(lengths)
        if not len(lengths):
            self._bases[self._bases == node] = base


def _find_longest(lengths: Ints) -> tuple[int, int]:
    """Return the largest and the second largest length; 0 in place of one that is missing."""
    if len(lengths) < 2:
        return int(lengths.max(initial=0)), 0
    second, longest = np.partition(lengths, -2)[-2:].tolist()
    return longest, second
