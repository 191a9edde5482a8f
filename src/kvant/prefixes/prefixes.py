"""Prefixes: what was read once is there for whoever begins with the same tokens.

One owner for any number of models, specs, sessions and engines. It holds caches over shared pools
within a limit of bytes; what is in use beside it costs it nothing. A `Shelf` is what a reader of
one model and one spec sees of it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from threading import RLock
from typing import Any

from transformers import PreTrainedModel

from kvant.cache import Cache
from kvant.cache.account import Account, account
from kvant.hf import HostCache
from kvant.prefixes.keys import PAGE, root
from kvant.prefixes.tree import EVERY, LONG, NEWEST, Kept, Lost, Match, Tree
from kvant.recipes import CacheSpec, GroupSpec, LayerSpec, RecurrentSpec, attention_in
from kvant.sizes import parse_size

CHUNK = 512  # tokens that are read at once, and at whose multiples prefixes end that are exact


class Prefixes:
    """Caches that may be gone on from, within a limit of bytes; for any number of threads."""

    def __init__(
        self, max_bytes: int | str | None = "1GiB", *, salt: str = "", exact: bool = False
    ) -> None:
        """`max_bytes` bounds all pages and states that are kept; None: only memory does.

        Who has another `salt` gets none of these. With `exact` a hit gives the bits of a prompt
        that was read from its beginning: it needs `prefill=stored` where a format is not raw, ends
        at multiples of 512 tokens, and is never of tokens that were decoded.
        """
        limit = parse_size(max_bytes) if isinstance(max_bytes, str) else max_bytes
        if limit is not None and limit < 0:
            raise ValueError(f"max_bytes={max_bytes}: 0 or more is needed")
        self.max_bytes = limit
        self.salt = salt
        self.exact = exact
        self._lock = RLock()
        self._trees: dict[bytes, Tree] = {}
        self._homes: dict[bytes, HostCache] = {}  # empty: they lend their pools
        self._counts: Counter[str] = Counter()

    def shelf(self, model: PreTrainedModel, cache: HostCache, salt: str = "") -> Shelf:
        """What a reader of this model sees whose caches are like this one."""
        spec = cache.spec
        if self.exact and (layer := _dense_prompts(spec)) is not None:
            raise ValueError(
                f"exact prefixes with prefill={layer.prefill}: chunks of a prompt see their own "
                "rows dense, so that what is stored depends on where they end; give the spec "
                "prefill=stored"
            )
        name = root(model, spec, "")
        own = root(model, spec, f"{len(self.salt)} {self.salt} {salt}")
        with self._lock:
            if own not in self._trees:
                self._trees[own] = Tree(own, name, pages_suffice=_pages_suffice(spec))
            tree = self._trees[own]
        return Shelf(self, tree, spec)

    def clear(self) -> None:
        """Let go of all of them."""
        with self._lock:
            for tree in self._trees.values():
                tree.clear()
            self._homes.clear()

    def evict(self, nbytes: int) -> int:
        """Free at least so many bytes, if there are as many; how many that was."""
        with self._lock:
            before = self.nbytes
            while before - self.nbytes < nbytes and self._evict_one():
                pass
            return before - self.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept; a page that somebody uses, too, is one of them."""
        with self._lock:
            return sum(account(states(some)).nbytes for some in self._by_home())

    def stats(self) -> dict[str, Any]:
        """What is kept, what it takes, and how much of what was asked for it served."""
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
            }

    # ---- what shelves ask

    def _match(self, tree: Tree, tokens: Sequence[int], held: int) -> Match:
        with self._lock:
            match = tree.match(tokens, len(tokens) - 1, CHUNK if self.exact else 1)
            if match.kept is not None and match.length > held:
                match.kept.used, match.kept.uses = time.monotonic(), match.kept.uses + 1
            return match

    def _count(self, asked: int, held: int) -> None:
        with self._lock:
            self._counts["hits" if held else "misses"] += 1
            self._counts["tokens_asked"] += asked
            self._counts["tokens_hit"] += held

    def _home(self, tree: Tree) -> HostCache | None:
        return self._homes.get(tree.home)

    def _beside(self, tree: Tree) -> list[tuple[Tree, Kept]]:
        """All that is kept in the pools of a tree."""
        return next((some for some in self._by_home() if some[0][0].home == tree.home), [])

    def _account(self, tree: Tree) -> Account:
        with self._lock:
            return account(states(self._beside(tree)))

    def _evict(self, tree: Tree, nbytes: int, *, used: bool) -> bool:
        with self._lock:
            before, went = self._account(tree).nbytes, False
            while self._evict_one(tree.home, in_use=used):
                went = True
                if before - self._account(tree).nbytes >= nbytes:
                    break
            return went

    def _renew(self, tree: Tree) -> None:
        with self._lock:
            if not self._beside(tree):
                self._homes.pop(tree.home, None)

    def _keep(self, tree: Tree, tokens: Sequence[int], cache: HostCache, prompt: int) -> None:
        with self._lock:
            if tree.home not in self._homes:
                self._homes[tree.home] = home = cache.fork()
                home.reset()
            # What is merged shares the pages, and has no checkpoints of recurrent layers.
            kept = tree.keep(tokens, self._homes[tree.home].merged([cache]), prompt)
            if kept is not None:
                kept.used = time.monotonic()
            if self.max_bytes is not None:
                while self.nbytes > self.max_bytes and self._evict_one():
                    pass

    # ---- within

    def _by_home(self) -> Iterable[list[tuple[Tree, Kept]]]:
        """All that is kept, by the pools in which it lies."""
        found: dict[bytes, list[tuple[Tree, Kept]]] = {}
        for tree in self._trees.values():
            found.setdefault(tree.home, []).extend((tree, kept) for kept in tree)
        return [some for some in found.values() if some]

    def _evict_one(self, home: bytes | None = None, *, in_use: bool = True) -> bool:
        """Let go of what is worth least for its bytes, if there is any; first what nobody uses.

        Only in the pools of `home`, and only what nobody uses, where that is said.
        """
        now, worst = time.monotonic(), None
        for some in self._by_home():
            if home not in (None, some[0][0].home):
                continue
            told = account(states(some))
            for (tree, kept), own, used in zip(some, told.own, told.used, strict=True):
                worth = used, _worth(kept, now) / max(own, 1)
                if used and not in_use:
                    continue
                if worst is None or worth < worst[0]:
                    worst = worth, tree, kept
        if worst is None:
            return False
        _, tree, kept = worst
        tree.drop(kept)
        self._counts["evicted"] += 1
        return True


def states(some: Iterable[tuple[Tree, Kept]]) -> list[Cache]:
    """The caches of what is kept."""
    return [kept.cache.states for _, kept in some]


class Shelf:
    """Prefixes of one model by one spec, for one reader."""

    def __init__(self, owner: Prefixes, tree: Tree, spec: CacheSpec) -> None:
        self.owner = owner
        self.lost: Lost | None = None  # where the last prompt left what is kept
        self._tree = tree
        self._spec = spec
        self._junction = 0  # up to which the last prompt shared pages that served it nothing

    def begin(self, tokens: Sequence[int], memory: HostCache, prompt: int) -> tuple[HostCache, int]:
        """The memory to read these tokens with: the one given, or one that holds more of them.

        `prompt` of the tokens that it holds were read as prompts; so many are of what is returned.
        """
        exact = self.owner.exact
        held = 0 if exact else memory.length
        match = self.owner._match(self._tree, tokens, held)
        self.lost = match.lost
        self._junction = match.shared if match.shared > max(match.length, held) else 0
        if match.kept is not None and match.length > held:
            found = match.kept.cache.fork()
            found.rewind(match.length)
            prompt = min(match.kept.prompt, match.length)
        elif held:
            return memory, prompt
        else:
            home = self.owner._home(self._tree)
            found, prompt = memory if home is None else home.fork(), 0
            found.reset()
        found.backend = memory.backend
        return found, prompt

    @property
    def home(self) -> HostCache | None:
        """An empty cache over the pools in which prefixes lie, once there are any."""
        return self.owner._home(self._tree)

    def account(self) -> Account:
        """What all that is kept in these pools takes."""
        return self.owner._account(self._tree)

    def evict(self, nbytes: int, *, used: bool = False) -> bool:
        """Free so many bytes in these pools, or all; did anything go?

        What somebody uses stays, unless it is `used`.
        """
        return self.owner._evict(self._tree, nbytes, used=used)

    def renew(self) -> None:
        """Let the next pools be others, if nothing is kept in these."""
        self.owner._renew(self._tree)

    @property
    def chunk(self) -> int | None:
        """Tokens at whose multiples prompts are to be cut; None: anywhere."""
        return CHUNK if self.owner.exact else None

    def count(self, asked: int, held: int) -> None:
        """Of a prompt of so many tokens, so many were there."""
        self.owner._count(asked, held)

    def stops(self, tokens: Sequence[int], begin: int, marks: Sequence[int]) -> list[int]:
        """The lengths at which to `keep` a prompt of these tokens as it is read, in order.

        `marks` are those at which others may begin to differ. Where pages are all that going on
        needs, no length is special.
        """
        if self._tree.pages_suffice:
            return []
        count = len(tokens)
        found = {self._junction, (count - 1) // PAGE * PAGE, *marks}
        if count - begin > LONG:
            found |= set(range(EVERY, count, EVERY)[-NEWEST:])
        if self.chunk is not None:
            found = {stop // self.chunk * self.chunk for stop in found}
        return sorted(stop for stop in found if begin < stop < count)

    def told(self, tokenizer: Any) -> str | None:
        """Where the last prompt left what is kept, in words."""
        if self.lost is None:
            return None
        was, now = (tokenizer.decode(list(ids)) for ids in (self.lost.was, self.lost.now))
        return f"prefix lost at token {self.lost.at:,}: {was!r} was there, {now!r} was asked for"

    def keep(self, tokens: Sequence[int], memory: HostCache, prompt: int) -> None:
        """Keep the memory of these tokens, if there is one of the kind that is kept here."""
        alike = memory.spec == self._spec and not any(x.foreign for x in memory.described)
        if tokens and alike and memory.length == len(tokens):
            self.owner._keep(self._tree, tokens, memory, prompt)


def _worth(kept: Kept, now: float) -> float:
    """Tokens that would have to be read again, by how long ago they were of use."""
    before = kept.node
    while before.before is not None and not (before.kept and before is not kept.node):
        before = before.before
    begin = max([one.length for one in before.kept if one is not kept], default=0)
    return max(kept.length - begin, 1) * (1 + kept.uses) / (1.0 + now - kept.used)


def _pages_suffice(spec: CacheSpec) -> bool:
    """Is a page boundary all that going on needs? Not a window, a state, or a dense tail."""
    parts = [
        part
        for recipe in spec.layers
        for part in (
            [one for _, one in recipe.parts] if isinstance(recipe, GroupSpec) else [recipe]
        )
    ]
    if any(isinstance(part, RecurrentSpec) for part in parts):
        return False
    return all(
        layer.retention.window is None and not layer.paging.tail and not layer.dense_until
        for layer in attention_in(*spec.layers)
    )


def _dense_prompts(spec: CacheSpec) -> LayerSpec | None:
    """A layer whose prompt chunks see their own rows otherwise than later ones do."""
    layers = attention_in(*spec.layers)
    return next((layer for layer in layers if layer.seals and layer.prefill == "dense"), None)
