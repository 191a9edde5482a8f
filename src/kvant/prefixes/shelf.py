"""What a reader of one model by one spec sees of prefixes: it begins there, and lets others."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from transformers import PreTrainedModel

from kvant.cache.account import Account
from kvant.errors import CacheError
from kvant.hf import HostCache, continues
from kvant.prefixes.archive import LITTLE, Restored
from kvant.prefixes.keys import PAGE, nameless, root, salted
from kvant.prefixes.threads import Daemons
from kvant.prefixes.tree import EVERY, LONG, NEWEST, Lost, served
from kvant.prefixes.waiting import STORE_TIMEOUT_S, Waiting
from kvant.recipes import CacheSpec, GroupSpec, LayerSpec, Recipe, RecurrentSpec, attention_in
from kvant.spec import words
from kvant.weights import is_packed

if TYPE_CHECKING:
    from kvant.prefixes.prefixes import Prefixes

log = logging.getLogger("kvant")

CHUNK = 512  # tokens that are read at once, and at whose multiples prefixes end that are exact
TRIES = 4  # prefixes of a store that are tried for a prompt, the longest first


class Names(NamedTuple):
    """Who computes rows, and how they are stored."""

    tree: bytes = b""  # the key before the first page, for one salt
    pools: bytes = b""  # the same for any
    about: Mapping[str, str] = {}  # for people


class Coming(NamedTuple):
    """What a store had of a prompt."""

    names: Names
    restored: Restored
    held: int  # so many of its tokens were in memory

    @property
    def came(self) -> range:
        """The tokens that were not in memory."""
        return range(self.held, len(self.restored.tokens))


class Shelf:
    """Prefixes of one model by one spec, for one reader."""

    def __init__(
        self, owner: Prefixes, model: PreTrainedModel, cache: HostCache, believed: float = 0.0
    ) -> None:
        """It looks at the model anew where it last did so `believed` seconds ago, or before."""
        self.owner = owner
        self.salt = ""  # of its reader, beside that of the owner
        self.lost: Lost | None = None  # where the last prompt left what is kept
        self.refusal: str | None = None  # why nothing is kept of it, or was found
        self._model = ref(model)
        self._spec = cache.spec
        self._pages_suffice = pages_suffice(cache.spec)
        self._page = max([PAGE, *(layer.page for layer in attention_in(*cache.spec.layers))])
        self._recurs = any(isinstance(part, RecurrentSpec) for part in _parts(cache.spec))
        self._junction = 0  # up to which the last prompt shared pages that served it nothing
        self._backend = str(cache.backend)
        if any(layer.foreign for layer in cache.described):
            self.refusal = "transformers keeps some of its layers"
        elif not continues(model):
            self.refusal = "it does not go on from several tokens at once"
        self._never = self.refusal is not None
        self._begun: Names | None = None
        self._believed = believed
        self._looked: tuple[float, Names | None] = (-math.inf, None)  # when, and what was found

    @property
    def _names(self) -> Names:
        """Who computed rows when the last prompt began; before the first, who does now."""
        if self._begun is None:
            self._begun = self._named() or Names()
        return self._begun

    def fork(self, salt: str | None = None) -> Shelf:
        """The same for another reader, or for one who shares with those of a salt alone."""
        twin = Shelf.__new__(Shelf)
        twin.__dict__.update(self.__dict__)
        if salt is not None:
            twin.salt, twin._begun = salt, None
            twin.doubt()
        return twin

    def doubt(self) -> None:
        """Believe nothing of the model any more: it may have been changed."""
        self._looked = (-math.inf, None)

    def needs_shapes(self, memory: HostCache) -> bool:
        """Whether a token is to be read before `fetch` can compare what a store has."""
        if self.owner.archive is None or memory.has_shapes or self._named() is None:
            return False
        return self.home is None or not self.home.has_shapes

    def fetch(self, tokens: Sequence[int], memory: HostCache) -> range:
        """Bring what a store has of these tokens, if that is sooner than to read them.

        The tokens that came. A store that does not answer is waited for `STORE_TIMEOUT_S` at most.
        """
        try:
            names = None if self.owner.archive is None else self._named()
            if names is None:
                return range(0)
            held = max(memory.length, self.owner._held(names.tree, tokens))
            empty = (self.home or memory).fork()
            empty.reset()
            coming = self._seek_in_time(tokens, empty, held)
            if coming is not None:
                self.add(coming)
                return coming.came
        except Exception as error:  # they can still be read
            told = repr(error)  # whoever keeps the error keeps caches
            log.warning("a store was not looked into: %s", told)
        return range(0)

    def _seek_in_time(self, tokens: Sequence[int], empty: HostCache, held: int) -> Coming | None:
        """Run `seek` in a thread of its own, for `STORE_TIMEOUT_S` at most."""
        until = time.monotonic() + STORE_TIMEOUT_S
        waiting, threads = Waiting(lambda: until - time.monotonic()), Daemons(1, "kvant-fetch")
        waiting.hold(lambda: empty)
        coming = threads.submit(self.seek, tokens, empty, held, waiting)
        threads.end()
        try:
            found = coming.result(STORE_TIMEOUT_S)
        except TimeoutError:
            log.warning("a store does not answer: a prompt of %d tokens is read", len(tokens))
            waiting.leave()
            return None
        except BaseException:  # an interrupt, too
            waiting.leave()
            raise
        waiting.drop(empty)
        return found

    def seek(
        self,
        tokens: Sequence[int],
        memory: HostCache,
        held: int,
        waiting: Waiting,
    ) -> Coming | None:
        """What a store has of these tokens beyond those that are `held`, in the pools of a memory.

        That is empty, or has the first of them.
        """
        archive, model = self.owner.archive, self._model()
        names = None if archive is None else self._named()
        if archive is None or model is None or names is None or waiting.left() <= 0:
            return None
        find = archive.find(names.tree, tokens, memory.states, held, suffice=self._pages_suffice)
        for found in islice(find, TRIES):
            waiting.until, reading = math.inf, self.seconds(found.length - held)
            if waiting.left() <= 0 or not archive.restores.likely(found.length, reading):
                return None
            waiting.until = time.monotonic() + reading
            restored = archive.read(found, tokens, memory, model.device, waiting)
            if restored is None:
                continue
            if restored.cache.resumable(len(tokens) - 1) > held:
                return Coming(names, restored, held)
            restored.cache.clear()
        return None

    def add(self, coming: Coming) -> None:
        """Keep what came from a store, for the prompt that is to begin."""
        restored = coming.restored
        self.owner._keep(coming.names, restored.tokens, restored.cache, restored.prompt)

    def reject(self, tokens: Sequence[int]) -> None:
        """Drop a prefix of a store with which the model failed."""
        log.warning("a prefix of %d tokens from a store is dropped: its model failed", len(tokens))
        self.owner._reject(self._names.tree, tokens)

    def serves(self, names: Names, restored: Restored, most: int) -> int:
        """So many tokens, not more than `most`, can be gone on from of what came from a store.

        None where they are another model's by now.
        """
        return served(restored, most, self.chunk or 1) if names == self._names else 0

    @property
    def unwritten(self) -> bool:
        """Is something kept in these pools that the store is yet to have?"""
        return self.owner._unwritten(self._names.pools)

    def took(self, count: int, seconds: float) -> None:
        """So many tokens of a prompt were read in so long."""
        if count >= PAGE:  # fewer tell nothing of many
            self.owner._took(self._names.pools, seconds / count)

    def seconds(self, count: int) -> float:
        """How long it takes to read so many tokens of a prompt; for ever, before that is known."""
        return self.owner._paces.get(self._names.pools, math.inf) * count

    def begin(self, tokens: Sequence[int], memory: HostCache, prompt: int) -> tuple[HostCache, int]:
        """The memory to read these tokens with: the one given, or one that holds more of them.

        `prompt` of the tokens that it holds were read as prompts; so many are of what is returned.
        """
        before, exact = self._begun, self.owner.exact
        self.lost, self._junction = None, 0
        names = self._named()
        if names is None:
            return memory, prompt
        self._begun = names
        held = 0 if exact or names != (before or names) else memory.length
        match = self.owner._match(names.tree, tokens, held)
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
        needs, no length is special. For a store the end of a short prompt is, too: who begins
        anew with it finds no page of the reply.
        """
        count = len(tokens)
        if self.refusal is not None:
            return []
        short = self.owner.archive is not None and (count - 1) % self._page * LITTLE > count
        last = count if count % self._page else count - 1  # nobody goes back into a whole page
        ends = short and self.chunk is None and not self._recurs and last > begin
        end = {last} if ends else set[int]()
        if self._pages_suffice:
            return sorted(end)
        found = {self._junction, (count - 1) // PAGE * PAGE, *marks}
        if count - begin > LONG:
            found |= set(range(EVERY, count, EVERY)[-NEWEST:])
        if self.chunk is not None:
            found = {stop // self.chunk * self.chunk for stop in found}
        return sorted({stop for stop in found if begin < stop < count} | end)

    def keep(self, tokens: Sequence[int], memory: HostCache, prompt: int) -> None:
        """Keep the memory of these tokens, if it is one that prefixes are of.

        Whoever was answered has the answer: where there is no memory to keep it, it is not kept.
        """
        if self.refusal is not None or not tokens or memory.length != len(tokens):
            return
        try:
            if memory.spec == self._spec and self._named() == self._names:
                self.owner._keep(self._names, tokens, memory, prompt)
        except (CacheError, MemoryError, RuntimeError, ValueError) as error:
            told = repr(error)  # whoever keeps the error keeps the memory
            log.warning("a prefix of %d tokens was not kept: %s", len(tokens), told)

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
        return self.owner._homes.get(self._names.pools)

    def account(self) -> Account:
        """What all that is kept in these pools takes."""
        return self.owner._account(self._names.pools)

    def evict(self, nbytes: int, *, unwritten: bool, used: bool) -> bool:
        """Free so many bytes in these pools, or all; did anything go?

        What a store is yet to have stays, unless it may be `unwritten`, and what somebody uses,
        unless it may be `used`.
        """
        return self.owner._evict(self._names.pools, nbytes, unwritten=unwritten, used=used)

    def _named(self) -> Names | None:
        """Name the model as it is now, if it can be named."""
        since, found = self._looked
        if time.monotonic() - since >= self._believed:
            since, found = time.monotonic(), self._look()
            self._looked = since, found
        return found

    def _look(self) -> Names | None:
        model = self._model()
        if self._never or model is None:
            return None
        self.refusal = nameless(model)
        if self.refusal is not None:
            return None
        home = root(model, self._spec)
        own = [self.owner.salt, _settings(model, self._backend) if self.owner.exact else ""]
        own += [self.salt] if self.salt else []
        about = {"model": type(model).__name__, "spec": words(self._spec)}
        return Names(salted(home, *own), home, about)


def _settings(model: PreTrainedModel, backend: str) -> str:
    """What rounds otherwise, beside what computes other rows."""
    return f"{backend} {model.config._attn_implementation} {is_packed(model)}"


def _parts(spec: CacheSpec) -> Iterator[Recipe]:
    """The recipes of all memories."""
    for recipe in spec.layers:
        if isinstance(recipe, GroupSpec):
            yield from (part for _, part in recipe.parts)
        else:
            yield recipe


def pages_suffice(spec: CacheSpec) -> bool:
    """Is a page boundary all that going on needs? No window, state, dense tail or open sinks."""
    if any(isinstance(part, RecurrentSpec) for part in _parts(spec)):
        return False
    return all(
        not (layer.retention.window or layer.paging.tail or layer.dense_until)
        and not (layer.seals and layer.retention.sinks)
        for layer in attention_in(*spec.layers)
    )


def dense_prompts(spec: CacheSpec) -> LayerSpec | None:
    """A layer whose prompt chunks see their own rows otherwise than later ones do."""
    layers = attention_in(*spec.layers)
    return next((layer for layer in layers if layer.seals and layer.prefill == "dense"), None)
