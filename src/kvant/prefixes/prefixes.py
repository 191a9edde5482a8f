"""Prefixes: what was read once is there for whoever begins with the same tokens.

One owner for any number of models, specs, sessions and engines. It holds caches over shared pools
within a limit of bytes. A `Shelf` is what a reader of one model and one spec sees of it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any
from weakref import finalize

from transformers import PreTrainedModel

from kvant.cache import Cache
from kvant.cache.account import Account, account
from kvant.hf import HostCache
from kvant.prefixes.archive import Archive, Write
from kvant.prefixes.restores import LATELY
from kvant.prefixes.shelf import CHUNK, Names, Shelf, dense_prompts, pages_suffice
from kvant.prefixes.tree import Kept, Match, Tree
from kvant.sizes import as_bytes
from kvant.spec import words
from kvant.stores import Store, Tiers, open_tiers

log = logging.getLogger("kvant")

SPARED = 0.9  # of the limit: so much is left once something had to go
PATIENCE = 1.0  # seconds that a reply waits to be kept


class Prefixes:
    """Caches that may be gone on from, within a limit of bytes; for any number of threads.

    >>> prefixes = kvant.Prefixes("64MiB")
    >>> for text in ("import os, sys", "import os, re"):  # they begin alike
    ...     steps = kvant.generate(model, tokenizer, text, prefixes=prefixes, max_new_tokens=4)
    ...     reply = "".join(step.text for step in steps)
    >>> prefixes.stats()["tokens_hit"] > 0
    True
    """

    def __init__(
        self,
        max_bytes: int | str | None = "1GiB",
        *,
        salt: str = "",
        exact: bool = False,
        store: str | Store | Sequence[str | Store] | Tiers | None = None,
    ) -> None:
        """`max_bytes` bounds all pages and states that are kept; None: only memory does.

        What is kept is also written to a `store`, and comes back from there: a folder, a URL, or a
        list of them, the nearest first. Who has another `salt` gets none of these. With `exact` a
        hit gives the bits of a prompt that was read from its beginning: it needs `prefill=stored`
        where a format is not raw, ends at multiples of 512 tokens, and is never of tokens that were
        decoded.
        """
        limit = None if max_bytes is None else as_bytes(max_bytes)
        if limit is not None and limit < 0:
            raise ValueError(f"max_bytes={max_bytes}: 0 or more is needed")
        self.max_bytes = limit
        self.salt = salt
        self.exact = exact
        self.archive: Archive | None = None
        if store is not None:
            tiers = store if isinstance(store, Tiers) else open_tiers(store)
            self.archive = Archive(tiers, shared=tiers is store)
            finalize(self, self.archive.close)
        self._lock = RLock()
        self._inside = False  # does this thread change something?
        self._trees: dict[bytes, Tree] = {}
        self._homes: dict[bytes, HostCache] = {}  # empty: they lend their pools
        self._most = 0  # bytes that there may be by now
        self._paces: dict[bytes, float] = {}  # by pools: seconds in which a token is read
        self._counts: Counter[str] = Counter()

    def shelf(self, model: PreTrainedModel, cache: HostCache, believed: float = 0.0) -> Shelf:
        """What a reader of this model sees whose caches are like this one.

        It looks at the weights whenever it begins or keeps a prompt, unless it did so less than
        `believed` seconds ago.
        """
        if self.exact and (layer := dense_prompts(cache.spec)) is not None:
            raise ValueError(
                f"exact prefixes with prefill={layer.prefill}: chunks of a prompt see their own "
                "rows dense, so that what is stored depends on where they end; give the spec "
                "prefill=stored"
            )
        if cache.spec.prunes:
            raise ValueError(
                f"prefixes with {words(cache.spec)}: rows that one prompt leaves out may matter "
                "to the next; leave the prune out, or share no prefixes"
            )
        return Shelf(self, model, cache, believed)

    def __enter__(self) -> Prefixes:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all of them, once they are in the store; nothing is written after that.

        A store that does not answer is not waited for.
        """
        if self.archive is not None:
            self.archive.close()
        self.clear()

    def abandon(self) -> None:
        """Let go of all of them; what is not in the store yet does not come there."""
        self.clear()
        if self.archive is not None:
            self.archive.close(0.0)

    def flush(self, seconds: float | None = None) -> bool:
        """Wait `seconds` at most for pending writes; return whether none is pending any more.

        A write that failed is not pending: `stats()` counts it. A store that does not answer for
        ten seconds ends the wait.
        """
        return self.archive is None or self.archive.tiers.flush(seconds)

    @property
    def nbytes_unwritten(self) -> int:
        """Bytes that wait to be written to the store."""
        return 0 if self.archive is None else self.archive.tiers.behind.nbytes

    def clear(self) -> None:
        """Let go of all of them; what is in a store stays there."""
        with self._changing():
            for tree in self._trees.values():
                for kept in list(tree):
                    kept.cancel()
                    tree.drop(kept)  # its nodes know each other, and would go later
            self._trees, self._homes, self._most = {}, {}, 0

    def evict(self, nbytes: int) -> int:
        """Let go of at least so many bytes, if there are as many; how many that was."""
        with self._changing():
            before = self.nbytes
            self._shrink(before - nbytes)
            return before - self.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept; a page that somebody uses, too, is one of them."""
        with self._lock:
            return sum(account(states(some)).nbytes for some in self._by_home())

    def stats(self) -> dict[str, Any]:
        """What is kept, what it takes, and how much of what was asked was there."""
        with self._lock:
            accounts = [account(states(some)) for some in self._by_home()]
            asked, hit = self._counts["tokens_asked"], self._counts["tokens_hit"]
            return {
                "prefixes": sum(map(len, self._by_home())),
                "nbytes": sum(one.nbytes for one in accounts),
                "nbytes_idle": sum(one.idle for one in accounts),
                "max_bytes": self.max_bytes,
                **{name: self._counts[name] for name in ("hits", "misses", "evicted")},
                "tokens_asked": asked,
                "tokens_hit": hit,
                "hit_rate": hit / asked if asked else 0.0,
                **({} if self.archive is None else {"store": self.archive.stats()}),
            }

    # ---- what shelves ask

    def _match(self, name: bytes, tokens: Sequence[int], held: int) -> Match:
        with self._lock:
            if name not in self._trees:
                return Match(None, 0, 0, None)
            every = CHUNK if self.exact else 1
            match = self._trees[name].match(tokens, len(tokens) - 1, every)
            if match.kept is not None and match.length > held:
                match.kept.used, match.kept.uses = time.monotonic(), match.kept.uses + 1
            return match

    def _reject(self, name: bytes, tokens: Sequence[int]) -> None:
        """Drop what a store had of these tokens, from memory and from its index."""
        if self.archive is not None:
            self.archive.reject(name, tokens)
        with self._changing():
            if (tree := self._trees.get(name)) is not None:
                for kept in tree.find_sharing(tokens):
                    kept.cancel()
                    tree.drop(kept)
            self._let_go()

    def _count(self, asked: int, held: int) -> None:
        with self._lock:
            self._counts["hits" if held else "misses"] += 1
            self._counts["tokens_asked"] += asked
            self._counts["tokens_hit"] += held

    def _held(self, name: bytes, tokens: Sequence[int]) -> int:
        """How many of the first tokens, not all, there are in memory."""
        with self._lock:
            tree = self._trees.get(name)
            return 0 if tree is None else tree.match(tokens, len(tokens) - 1).length

    def _took(self, home: bytes, seconds: float) -> None:
        with self._lock:
            old = self._paces.get(home, seconds)
            self._paces[home] = LATELY * seconds + (1 - LATELY) * old

    def _keep(self, names: Names, tokens: Sequence[int], cache: HostCache, prompt: int) -> None:
        """Unless it does not fit, or a collection of garbage ended a reply in the middle of this.

        Who collects garbage may hold the pools: so it does not wait for who waits for them.
        """
        if not self._lock.acquire(timeout=PATIENCE):
            return
        try:
            if not self._inside:
                with self._changing():
                    self._add(names, tokens, cache, prompt)
        finally:
            self._lock.release()

    def _account(self, home: bytes) -> Account:
        with self._lock:
            return account(states(self._beside(home)))

    def _unwritten(self, home: bytes) -> bool:
        with self._lock:
            return any(kept.unwritten for _, kept in self._beside(home))

    def _evict(self, home: bytes, nbytes: int, *, unwritten: bool, used: bool) -> bool:
        with self._changing():
            before, left = self._counts["evicted"], self._account(home).nbytes - nbytes
            self._shrink(left, home, unwritten=unwritten, used=used)
            return self._counts["evicted"] > before

    # ---- within

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            before, self._inside = self._inside, True
            try:
                yield
            finally:
                self._inside = before

    def _add(self, names: Names, tokens: Sequence[int], cache: HostCache, prompt: int) -> None:
        name, home = names.tree, names.pools
        lends = self._homes.get(home)
        if lends is None:
            lends = cache.fork()
            lends.reset()
        # What is merged shares the pages, and has no checkpoints of recurrent layers.
        merged = lends.merged([cache])
        merged.context.notes.clear()  # what it read is somebody else's
        alone = account([merged.states]).nbytes
        tree = self._trees.get(name)
        if tree is None:
            suffice = pages_suffice(cache.spec)
            tree = Tree(name, home, pages_suffice=suffice, about=names.about)
        if self.max_bytes is not None and alone > self.max_bytes:
            return
        self._homes[home], self._trees[name] = lends, tree
        kept = tree.keep(tokens, merged, prompt)
        if kept is not None:
            kept.used = time.monotonic()
            kept.writes += self._written(tree, tokens, merged, prompt)
        self._most += alone
        if self.max_bytes is not None and self._most > self.max_bytes:
            self._most = self.nbytes
            if self._most > self.max_bytes:
                self._shrink(int(SPARED * self.max_bytes), but=kept)
                self._most = self.nbytes

    def _written(
        self, tree: Tree, tokens: Sequence[int], cache: HostCache, prompt: int
    ) -> list[Write]:
        """Let the store have what it has not."""
        if self.archive is None:
            return []
        write = self.archive.write(
            *(tree.top.key, tokens, cache.states, prompt),
            about=tree.about,
            suffice=tree.pages_suffice,
            upto=prompt // CHUNK * CHUNK if self.exact else None,
        )
        return [write] if write.pieces is not None else []

    def _by_home(self) -> list[list[tuple[Tree, Kept]]]:
        """All that is kept, by the pools in which it lies."""
        found: dict[bytes, list[tuple[Tree, Kept]]] = {}
        for tree in self._trees.values():
            found.setdefault(tree.home, []).extend((tree, kept) for kept in tree)
        return [some for some in found.values() if some]

    def _beside(self, home: bytes) -> list[tuple[Tree, Kept]]:
        """All that is kept in some pools."""
        return next((some for some in self._by_home() if some[0][0].home == home), [])

    def _shrink(
        self,
        nbytes: int,
        home: bytes | None = None,
        *,
        unwritten: bool = True,
        used: bool = True,
        but: Kept | None = None,
    ) -> None:
        """Let go of what is worth least for its bytes, until so many are left.

        First of what nobody uses, and only of that unless it may be `used`; only of what no store
        waits for unless it may be `unwritten`. In the pools of `home`, or in all. `but` that, which
        is new, stays.
        """
        while self._drop_least(nbytes, home, unwritten=unwritten, used=used, but=but):
            pass  # nobody holds any more what went
        self._let_go()

    def _drop_least(
        self, nbytes: int, home: bytes | None, *, unwritten: bool, used: bool, but: Kept | None
    ) -> bool:
        """A round of that; False where nothing went."""
        groups = [x for x in self._by_home() if home in (None, x[0][0].home)]
        accounts = [account(states(some)) for some in groups]
        over, now = sum(one.nbytes for one in accounts) - nbytes, time.monotonic()
        worth = sorted(
            (
                (in_use, _worth(kept, now) / max(share, 1.0), own, share, tree, kept)
                for some, told in zip(groups, accounts, strict=True)
                for (tree, kept), own, share, in_use in zip(
                    some,
                    told.own,
                    told.share,
                    told.used,
                    strict=False,  # others wait behind
                )
                if kept is not but and (used or not in_use) and (unwritten or not kept.unwritten)
            ),
            key=lambda one: one[:2],
        )
        if over <= 0:
            return False
        for _, _, own, share, tree, kept in worth:
            kept.cancel()  # first: once it is in no tree, nobody else can
            tree.drop(kept)
            self._counts["evicted"] += 1
            over -= own
            if over <= 0 or share > own:  # what it shared may be another one's alone by now
                break
        return bool(worth)

    def _let_go(self) -> None:
        """Forget trees and pools in which nothing is kept."""
        self._trees = {name: tree for name, tree in self._trees.items() if any(True for _ in tree)}
        homes = {tree.home for tree in self._trees.values()}
        self._homes = {name: home for name, home in self._homes.items() if name in homes}


def states(some: Iterable[tuple[Tree, Kept]]) -> list[Cache]:
    """The caches of what is kept; behind them, others that are yet to be written."""
    kept = [kept for _, kept in some]
    return [one.cache.states for one in kept] + [cache for one in kept for cache in one.waiting]


def _worth(kept: Kept, now: float) -> float:
    """Tokens that would have to be read again, by how long ago they were of use."""
    before = kept.node
    while before.before is not None and not (before.kept and before is not kept.node):
        before = before.before
    begin = max([one.length for one in before.kept if one is not kept], default=0)
    return max(kept.length - begin, 1) * (1 + kept.uses) / (1.0 + now - kept.used)
