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
from weakref import ref

from transformers import PreTrainedModel

from kvant.cache import Cache
from kvant.cache.account import Account, account
from kvant.errors import CacheError
from kvant.hf import HostCache, continues
from kvant.prefixes.keys import PAGE, nameless, root, salted
from kvant.prefixes.tree import EVERY, LONG, NEWEST, Kept, Lost, Match, Tree
from kvant.recipes import CacheSpec, GroupSpec, LayerSpec, RecurrentSpec, attention_in
from kvant.sizes import parse_size
from kvant.weights import is_packed

log = logging.getLogger("kvant")

CHUNK = 512  # tokens that are read at once, and at whose multiples prefixes end that are exact
SPARED = 0.9  # of the limit: so much is left once something had to go
PATIENCE = 1.0  # seconds that a reply waits to be kept


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
        self._inside = False  # does this thread change something?
        self._trees: dict[bytes, Tree] = {}
        self._homes: dict[bytes, HostCache] = {}  # empty: they lend their pools
        self._most = 0  # bytes that there may be by now
        self._counts: Counter[str] = Counter()

    def shelf(self, model: PreTrainedModel, cache: HostCache) -> Shelf:
        """What a reader of this model sees whose caches are like this one."""
        if self.exact and (layer := _dense_prompts(cache.spec)) is not None:
            raise ValueError(
                f"exact prefixes with prefill={layer.prefill}: chunks of a prompt see their own "
                "rows dense, so that what is stored depends on where they end; give the spec "
                "prefill=stored"
            )
        return Shelf(self, model, cache)

    def clear(self) -> None:
        """Let go of all of them."""
        with self._changing():
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

    def _count(self, asked: int, held: int) -> None:
        with self._lock:
            self._counts["hits" if held else "misses"] += 1
            self._counts["tokens_asked"] += asked
            self._counts["tokens_hit"] += held

    def _keep(
        self, names: tuple[bytes, bytes], tokens: Sequence[int], cache: HostCache, prompt: int
    ) -> None:
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

    def _evict(self, home: bytes, nbytes: int, *, used: bool) -> bool:
        with self._changing():
            before = self._counts["evicted"]
            self._shrink(self._account(home).nbytes - nbytes, home, used=used)
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

    def _add(
        self, names: tuple[bytes, bytes], tokens: Sequence[int], cache: HostCache, prompt: int
    ) -> None:
        name, home = names
        lends = self._homes.get(home)
        if lends is None:
            lends = cache.fork()
            lends.reset()
        # What is merged shares the pages, and has no checkpoints of recurrent layers.
        merged = lends.merged([cache])
        merged.context.notes.clear()  # what it read is somebody else's
        alone = account([merged.states]).nbytes
        if self.max_bytes is not None and alone > self.max_bytes:
            return
        self._homes[home] = lends
        if name not in self._trees:
            self._trees[name] = Tree(name, home, pages_suffice=_pages_suffice(cache.spec))
        kept = self._trees[name].keep(tokens, merged, prompt)
        if kept is not None:
            kept.used = time.monotonic()
        self._most += alone
        if self.max_bytes is not None and self._most > self.max_bytes:
            self._most = self.nbytes
            if self._most > self.max_bytes:
                self._shrink(int(SPARED * self.max_bytes))
                self._most = self.nbytes

    def _by_home(self) -> list[list[tuple[Tree, Kept]]]:
        """All that is kept, by the pools in which it lies."""
        found: dict[bytes, list[tuple[Tree, Kept]]] = {}
        for tree in self._trees.values():
            found.setdefault(tree.home, []).extend((tree, kept) for kept in tree)
        return [some for some in found.values() if some]

    def _beside(self, home: bytes) -> list[tuple[Tree, Kept]]:
        """All that is kept in some pools."""
        return next((some for some in self._by_home() if some[0][0].home == home), [])

    def _shrink(self, nbytes: int, home: bytes | None = None, *, used: bool = True) -> None:
        """Let go of what is worth least for its bytes, until so many are left.

        First of what nobody uses, and only of that where `used` says so; in the pools of `home`, or
        in all.
        """
        while True:
            groups = [x for x in self._by_home() if home in (None, x[0][0].home)]
            accounts = [account(states(some)) for some in groups]
            over, now = sum(one.nbytes for one in accounts) - nbytes, time.monotonic()
            worth = sorted(
                (
                    (in_use, _worth(kept, now) / max(share, 1.0), own, tree, kept)
                    for some, told in zip(groups, accounts, strict=True)
                    for (tree, kept), own, share, in_use in zip(
                        some, told.own, told.share, told.used, strict=True
                    )
                    if used or not in_use
                ),
                key=lambda one: one[:2],
            )
            if over <= 0 or not worth:
                break
            for _, _, own, tree, kept in worth:
                tree.drop(kept)
                self._counts["evicted"] += 1
                over -= own
                if over <= 0:
                    break
        self._let_go()

    def _let_go(self) -> None:
        """Forget trees and pools in which nothing is kept."""
        self._trees = {name: tree for name, tree in self._trees.items() if any(True for _ in tree)}
        homes = {tree.home for tree in self._trees.values()}
        self._homes = {name: home for name, home in self._homes.items() if name in homes}


def states(some: Iterable[tuple[Tree, Kept]]) -> list[Cache]:
    """The caches of what is kept."""
    return [kept.cache.states for _, kept in some]


class Shelf:
    """Prefixes of one model by one spec, for one reader."""

    def __init__(self, owner: Prefixes, model: PreTrainedModel, cache: HostCache) -> None:
        self.owner = owner
        self.lost: Lost | None = None  # where the last prompt left what is kept
        self.refusal: str | None = None  # why nothing is kept of it, or was found
        self._model = ref(model)
        self._spec = cache.spec
        self._pages_suffice = _pages_suffice(cache.spec)
        self._junction = 0  # up to which the last prompt shared pages that served it nothing
        self._backend = str(cache.backend)
        if any(layer.foreign for layer in cache.described):
            self.refusal = "transformers keeps some of its layers"
        elif not continues(model):
            self.refusal = "it does not go on from several tokens at once"
        self._never = self.refusal is not None
        self._names = b"", b""  # of the tree and of its pools, when the last prompt began
        self._named()

    def fork(self) -> Shelf:
        """The same for another reader."""
        twin = Shelf.__new__(Shelf)
        twin.__dict__.update(self.__dict__)
        return twin

    def begin(self, tokens: Sequence[int], memory: HostCache, prompt: int) -> tuple[HostCache, int]:
        """The memory to read these tokens with: the one given, or one that holds more of them.

        `prompt` of the tokens that it holds were read as prompts; so many are of what is returned.
        """
        before, exact = self._names, self.owner.exact
        self.lost, self._junction = None, 0
        if not self._named():
            return memory, prompt
        held = 0 if exact or self._names != before else memory.length
        match = self.owner._match(self._names[0], tokens, held)
        self.lost = match.lost
        self._junction = match.shared if match.shared > max(match.length, held) else 0
        if match.kept is not None and match.length > held:
            found = match.kept.cache.fork()
            found.rewind(match.length)
            prompt = min(match.kept.prompt, match.length)
        elif held:
            return memory, prompt
        else:
            home = self.home
            found, prompt = memory if home is None else home.fork(), 0
            found.reset()
        found.backend = memory.backend
        return found, prompt

    def count(self, asked: int, held: int) -> None:
        """Of a prompt of so many tokens, so many were there."""
        self.owner._count(asked, held)

    def reachable(self, memory: HostCache, to: int) -> int:
        """To where a memory may go back: others are to find in it what they would compute."""
        return memory.resumable(to)

    @property
    def chunk(self) -> int | None:
        """Tokens at whose multiples prompts are to be cut; None: anywhere."""
        return CHUNK if self.owner.exact else None

    def stops(self, tokens: Sequence[int], begin: int, marks: Sequence[int]) -> list[int]:
        """The lengths at which to `keep` a prompt of these tokens as it is read, in order.

        `marks` are those at which others may begin to differ. Where pages are all that going on
        needs, no length is special.
        """
        if self._pages_suffice or self.refusal is not None:
            return []
        count = len(tokens)
        found = {self._junction, (count - 1) // PAGE * PAGE, *marks}
        if count - begin > LONG:
            found |= set(range(EVERY, count, EVERY)[-NEWEST:])
        if self.chunk is not None:
            found = {stop // self.chunk * self.chunk for stop in found}
        return sorted(stop for stop in found if begin < stop < count)

    def keep(self, tokens: Sequence[int], memory: HostCache, prompt: int) -> None:
        """Keep the memory of these tokens, if it is one that prefixes are of.

        Whoever was answered has the answer: where there is no memory to keep it, it is not kept.
        """
        if self.refusal is not None or not tokens or memory.length != len(tokens):
            return
        try:
            before = self._names
            if memory.spec == self._spec and self._named() and self._names == before:
                self.owner._keep(self._names, tokens, memory, prompt)
        except (CacheError, MemoryError, RuntimeError, ValueError) as error:
            log.warning("a prefix of %d tokens was not kept: %r", len(tokens), error)

    def told(self, tokenizer: Any) -> str | None:
        """Where the last prompt left what is kept, or why nothing is, in words."""
        if self.refusal is not None:
            return f"nothing is kept of this model: {self.refusal}"
        if self.lost is None:
            return None
        was, now = (tokenizer.decode(list(ids)) for ids in (self.lost.was, self.lost.now))
        return f"prefix lost at token {self.lost.at:,}: {was!r} was there, {now!r} was asked for"

    # ---- what an engine asks besides

    @property
    def home(self) -> HostCache | None:
        """An empty cache over the pools in which prefixes lie, once there are any."""
        return self.owner._homes.get(self._names[1])

    def account(self) -> Account:
        """What all that is kept in these pools takes."""
        return self.owner._account(self._names[1])

    def evict(self, nbytes: int, *, used: bool = False) -> bool:
        """Free so many bytes in these pools, or all; did anything go?

        What somebody uses stays, unless it is `used`.
        """
        return self.owner._evict(self._names[1], nbytes, used=used)

    def _named(self) -> bool:
        """Name the model as it is now; False where it has no name."""
        model = self._model()
        if self._never or model is None:
            return False
        self.refusal = nameless(model)
        if self.refusal is None:
            home = root(model, self._spec)
            own = self.owner.salt, _settings(model, self._backend) if self.owner.exact else ""
            self._names = salted(home, *own), home
        return self.refusal is None


def _settings(model: PreTrainedModel, backend: str) -> str:
    """What rounds otherwise, beside what computes other rows."""
    return f"{backend} {model.config._attn_implementation} {is_packed(model)}"


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
