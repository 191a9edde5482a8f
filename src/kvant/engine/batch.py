"""Sequences of one model whose caches share pages: prompts in chunks, and a token of each at once.

Those that decode lie under one cache (`kvant.merge`); others have one of their own, over the same
pools. Who comes or goes costs a merge or a selection of integers, and no copy of pages. A model
whose attention cannot read sequences of different lengths decodes them one after the other.

On a GPU a forward of the batch is replayed from a graph. There is one for some numbers of
sequences; a batch of another number is filled up with idle ones, of a few tokens that mean nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvant.cache import merge
from kvant.cache.account import Account
from kvant.cache.files import save
from kvant.engine.room import IDLE
from kvant.errors import UnsupportedView
from kvant.extent import Kind
from kvant.generation import HostDecoder
from kvant.hf import HostCache, Level, Replayer, loaded
from kvant.prefixes import Coming, Prefixes, Shelf, Waiting
from kvant.recipes import CacheSpec
from kvant.recording import Blocks

log = logging.getLogger("kvant")

BELIEVED = 1.0  # seconds: looking at all weights takes as long as a token, or longer


@dataclass(eq=False)
class Seat:
    """A sequence: its tokens, and the cache that holds them, until it is one of the batch."""

    tokens: list[int]  # grows outside, a token before each decode
    prompt: int = 0  # of them, so many were read in chunks
    cache: HostCache | None = field(default=None, repr=False)
    file: Path | None = None  # where its pages are while they are put aside
    salt: str = ""  # it shares prefixes with those who have the same
    shelf: Shelf | None = field(default=None, repr=False)  # that of the salt, once it was needed


class Batch:
    """The memory of all sequences that one model is serving."""

    def __init__(self, decoder: HostDecoder, empty: HostCache, backend: str | None = None) -> None:
        self.decoder = decoder
        # Can sequences of different lengths be decoded at once? Else each by itself.
        self.ragged = decoder.support.level >= Level.TOGETHER
        self._empty = empty  # never has tokens: all others share its pools
        self._empty.backend = backend
        self._empty.widen(1)  # the token of a forward that died behind all layers is taken back
        self._shelf: Shelf | None = None  # of those without a salt
        # Of others: a shelf is kept by the sequences with its salt, and goes with the last one.
        self._salted: WeakValueDictionary[str, Shelf] = WeakValueDictionary()
        self._seats: list[Seat] = []  # the sequences of the batch, in the order of its cache
        self._cache: HostCache | None = None  # the cache of the batch
        self._replayers: dict[int, Replayer] = {}  # by the number of sequences,
        self._blocks = Blocks()  # and the memory of their recordings
        self._idle: list[Seat] = []  # those of the batch that nobody asked for
        self._blank: Seat | None = None  # what they begin with

    @property
    def spec(self) -> CacheSpec:
        return self._empty.spec

    def share(self, prefixes: Prefixes) -> None:
        """From now on, begin with what there is of a prompt, and keep what is asked for."""
        self._shelf = prefixes.shelf(self.decoder.model, self._empty, BELIEVED)
        if (home := self._shelf.home) is not None:
            home = home.fork()
            home.backend = self._empty.backend
            self._empty = home

    def doubt(self) -> None:
        """Look at the weights before anything of a prefix is believed."""
        for shelf in filter(None, (self._shelf, *self._salted.values())):
            shelf.doubt()

    @property
    def writes(self) -> bool:
        """Is something kept here that a store is yet to have?"""
        return self._shelf is not None and self._shelf.unwritten

    def flush(self, seconds: float) -> None:
        """Wait until the store has all that is kept, so long at most; for any thread."""
        if self._shelf is not None:
            self._shelf.owner.flush(seconds)

    def scout(self, seat: Seat, waiting: Waiting) -> Callable[[], Coming | None]:
        """What looks for a prompt in a store, in another thread, while somebody waits."""
        shelf = self._shelf_of(seat)
        assert shelf is not None
        if not self._empty.has_shapes:  # a store may hold anything: what comes is compared
            self.read(Seat(seat.tokens[:1]), 1)
        memory, tokens, own = (seat.cache or self._empty).fork(), list(seat.tokens), shelf.fork()
        held = memory.length
        waiting.hold(lambda: memory)

        def look() -> Coming | None:
            try:
                return own.seek(tokens, memory, held, waiting)
            finally:
                waiting.drop(memory)  # its pages may be needed before the thread forgets it

        return look

    def take(self, seat: Seat, coming: Coming, *, keep: bool) -> int:
        """Let a prompt go on from what came of it from a store; how much of it there is now.

        `keep` it for others, too.
        """
        shelf, had = self._shelf_of(seat), self.held(seat)
        assert shelf is not None
        restored = coming.restored
        held = shelf.serves(coming.names, restored, len(seat.tokens) - 1)
        if held <= had:
            return had
        if seat.cache is not None:
            cache = seat.cache.extended(restored.cache)
        else:
            whole = restored.cache
            cache = self._empty.merged([whole]) if self._shares else whole.fork()
        seat.cache = None  # before a rewind takes another page
        restored.cache.clear()
        self._lend(cache)
        if keep:
            shelf.add(coming._replace(restored=replace(restored, cache=cache)))
            cache = cache.fork()
        cache.rewind(held)
        # Pages that it had already may be of a reply.
        read = restored.prompt if seat.prompt == had else min(restored.prompt, seat.prompt)
        seat.cache, seat.prompt = cache, min(read, held)
        return held

    def held(self, seat: Seat) -> int:
        """How many tokens of a sequence are in memory."""
        if seat in self._seats and self._cache is not None:
            return self._cache.states.lengths[self._seats.index(seat)]
        return 0 if seat.cache is None else seat.cache.length

    def took(self, count: int, seconds: float) -> None:
        """So many tokens of a prompt were read in so long."""
        if self._shelf is not None:
            self._shelf.took(count, seconds)

    def seconds(self, count: int) -> float:
        """How long it takes to read so many tokens, as far as is known."""
        return math.inf if self._shelf is None else self._shelf.seconds(count)

    def begin(self, seat: Seat, marks: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """How many tokens of a prompt there are, and where chunks behind them are to end."""
        shelf = self._shelf_of(seat)
        if shelf is None:
            return 0, ()
        cache, prompt = shelf.begin(seat.tokens, self._empty.fork(), 0)
        held = self.held(seat)
        if cache.length > held:  # in our pools: whoever else shares prefixes may have others
            seat.cache = self._empty.merged([cache]) if self._shares else cache
            seat.prompt, held = prompt, cache.length
            self._lend(cache)
        return held, tuple(shelf.stops(seat.tokens, held, marks))

    def count(self, asked: int, held: int) -> None:
        """A prompt of so many tokens is served, of which so many were there."""
        if self._shelf is not None:
            self._shelf.count(asked, held)

    def keep(self, seat: Seat) -> None:
        """Let others go on from what a sequence has, if it has something."""
        (cache, place), shelf = self._place(seat), self._shelf_of(seat)
        if shelf is None or cache is None:
            return
        alone = cache if seat.cache is not None else cache.extract(place)
        shelf.keep(seat.tokens[: alone.length], alone, seat.prompt)

    def reject(self, seat: Seat, count: int) -> None:
        """Drop the first tokens of a sequence from prefixes: its model failed with them."""
        if (shelf := self._shelf_of(seat)) is not None:
            shelf.reject(seat.tokens[:count])

    def evict(self, nbytes: int, *, unwritten: bool = False, used: bool = False) -> bool:
        """Let go of prefixes of so many bytes; did anything go?

        Of what nobody uses, and a store has, where there is one, unless it is said otherwise.
        """
        if self._shelf is None:
            return False
        return self._shelf.evict(nbytes, unwritten=unwritten, used=used)

    def kept(self) -> Account | None:
        """What prefixes take; None: nothing is kept."""
        return None if self._shelf is None else self._shelf.account()

    def shared(self, seat: Seat, length: int, kept: Account) -> dict[Kind, tuple[int, int]]:
        """Pages of the first tokens of a sequence that prefixes hold, too."""
        cache, place = self._place(seat)
        return {} if cache is None else kept.shared(cache.states, place, length)

    def lost(self, seat: Seat, tokenizer: Any) -> str | None:
        """Where the prompt that was begun last left what is kept, in words."""
        shelf = self._shelf_of(seat)
        return None if shelf is None else shelf.told(tokenizer)

    def stats(self, seats: Sequence[Seat]) -> dict[str, int]:
        """Bytes of the pages, and of what recurrent layers keep of these sequences."""
        told, states = self._empty.states.pooled(), 0
        if self._empty.states.host_states:  # else nobody but us holds a cache, be it for a moment
            caches = {self._cache, *(seat.cache for seat in seats)}
            held = [cache.states.host_states for cache in caches if cache is not None]
            states = sum(state.nbytes for every in held for state in every)
        return told | {"nbytes_states": states}

    def read(self, seat: Seat, count: int) -> Tensor:
        """The logits [vocabulary] behind the next tokens of a prompt."""
        cache = self._empty.fork() if seat.cache is None else seat.cache
        held = cache.length
        with cache.prompting():
            logits = self.decoder.logits(seat.tokens[held : held + count], cache)[-1]
        cache.states.release()
        seat.cache = cache
        if seat.prompt == held:
            seat.prompt += count
        self._lend(cache)
        return logits

    def decode(self, seats: Sequence[Seat]) -> tuple[Tensor, dict[int, Exception]]:
        """The logits behind the newest token of each, but of those that failed: by place, why.

        A forward that dies gave no sequence a token: then each is tried by itself.
        """
        if self.ragged and len(seats) > 1:
            try:
                return self._together(seats), {}
            except UnsupportedView as error:
                self._part(error)
            except Exception as error:
                told = repr(error)  # whoever keeps the error keeps our caches
                log.warning("a forward of %d sequences died: %s: one by one", len(seats), told)
        rows, failed = list[Tensor](), dict[int, Exception]()
        for place, seat in enumerate(seats):
            try:
                rows.append(self._alone(seat))
            except Exception as error:
                failed[place] = error
        return torch.cat(rows) if rows else torch.empty(0), failed

    def fork(self, seat: Seat) -> Seat:
        """Another sequence behind the same tokens, which shares their pages."""
        assert seat.cache is not None
        seat.cache.prune()  # so that they share what stays
        return replace(seat, tokens=list(seat.tokens), cache=seat.cache.fork())

    def drop(self, seat: Seat) -> None:
        """Let a sequence go."""
        if seat in self._seats:
            self._stay([one for one in self._seats if one is not seat])
        seat.cache = None
        if seat.file is not None:
            seat.file.unlink(missing_ok=True)
            seat.file = None

    def put_aside(self, seat: Seat, path: Path) -> None:
        """Write the pages of a sequence to a file, if it has any, and let go of them."""
        self._own([seat])
        if seat.cache is not None:
            seat.file = path
            save(seat.cache, path)
            seat.cache = None

    def take_back(self, seat: Seat) -> None:
        """Have the pages again that were put aside, if there were any."""
        if seat.file is not None:
            cache = loaded(seat.file, self.decoder.model)
            seat.file.unlink()
            seat.file = None
            cache.backend = self._empty.backend
            seat.cache = self._empty.merged([cache]) if self._shares else cache
            self._lend(seat.cache)

    def clear(self) -> None:
        """No sequence is left: free all memory, but what prefixes hold."""
        self._seats, self._cache = [], None
        self._idle, self._blank = [], None
        self._replayers.clear()
        self._blocks = Blocks()
        self._empty.clear()

    def check(self) -> None:
        """Are all slots free, or counted as often as they are held?"""
        self._empty.states.check()

    # ---- within

    @property
    def _shares(self) -> bool:
        """Are there pools to share? Before the first rows nobody knows how large pages are."""
        return any(leaf.storage is not None for _, leaf in self._empty.states.contents.attention())

    def _shelf_of(self, seat: Seat) -> Shelf | None:
        """What a sequence sees of prefixes."""
        if self._shelf is None or not seat.salt:
            return self._shelf
        if seat.shelf is None:
            found = self._salted.get(seat.salt)
            seat.shelf = self._shelf.fork(seat.salt) if found is None else found
            self._salted[seat.salt] = seat.shelf
        return seat.shelf

    def _place(self, seat: Seat) -> tuple[HostCache | None, int]:
        """The cache that has a sequence, and where in it."""
        if seat in self._seats:
            return self._cache, self._seats.index(seat)
        return seat.cache, 0

    def _lend(self, cache: HostCache) -> None:
        """Let others have the pools of this one, if it is the first."""
        if not self._shares:
            self._empty = cache.fork()
            self._empty.reset()

    def _together(self, seats: Sequence[Seat]) -> Tensor:
        """One forward for all of them."""
        self._fill_up(graph_size(len(seats)) - len(seats) if self._replays else 0)
        cache = self._gathered([*seats, *self._idle])
        for seat in self._idle:
            seat.tokens.append(0)
        try:
            logits = self._forward(self._seats, cache)
        except BaseException:
            self._fill_up(0)
            raise
        order = [self._seats.index(seat) for seat in seats]
        return logits if order == list(range(len(logits))) else logits[order]

    def _alone(self, seat: Seat) -> Tensor:
        self._own([seat])
        assert seat.cache is not None
        return self._forward([seat], seat.cache)

    def _forward(self, seats: Sequence[Seat], cache: HostCache) -> Tensor:
        """The logits behind the newest tokens of these, of which the cache has all others."""
        replayer = self._replayers.get(len(seats)) or self.decoder.replayer(self._blocks)
        if replayer is not None:
            self._replayers[len(seats)] = replayer
        tokens = [seat.tokens[-1] for seat in seats]
        positions = [len(seat.tokens) - 1 for seat in seats]
        with _or_back(cache):
            logits = self.decoder.rows(tokens, positions, cache, replayer)
        cache.states.release()
        return logits

    @property
    def _replays(self) -> bool:
        """Are there graphs, as far as we know?"""
        refused = any(one.refusal is not None for one in self._replayers.values())
        return self.decoder.captures and not refused

    def _fill_up(self, count: int) -> None:
        """Let there be so many idle sequences; those that became long begin anew."""
        stay = [seat for seat in self._idle if len(seat.tokens) < IDLE][:count]
        if gone := [seat for seat in self._idle if seat not in stay]:
            self._stay([seat for seat in self._seats if seat not in gone])
        if count and self._blank is None:
            blank = Seat([0])
            self.read(blank, 1)
            self._blank = blank
        self._idle = stay
        while len(self._idle) < count:
            assert self._blank is not None
            self._idle.append(self.fork(self._blank))

    def _gathered(self, seats: Sequence[Seat]) -> HostCache:
        """The cache of exactly these."""
        self._own([seat for seat in self._seats if seat not in seats])
        new = [seat for seat in seats if seat not in self._seats]
        old = [] if self._cache is None else [self._cache]
        merged = merge([*old, *(seat.cache for seat in new)]) if new else old[0]
        self._seats, self._cache = [*self._seats, *new], merged
        for seat in new:
            seat.cache = None
        return merged

    def _own(self, seats: Sequence[Seat]) -> None:
        """Let each of these have a cache of its own, and the batch go on without them."""
        here = [seat for seat in seats if seat in self._seats]
        if not here:
            return
        assert self._cache is not None
        for seat in here:
            seat.cache = self._cache.extract(self._seats.index(seat))
        self._stay([seat for seat in self._seats if seat not in here])

    def _stay(self, seats: list[Seat]) -> None:
        """The batch goes on with these of its sequences."""
        if seats and self._cache is not None:
            self._cache.batch_select_indices([self._seats.index(seat) for seat in seats])
        elif not seats:
            self._cache = None
        self._seats = seats

    def _part(self, why: Exception) -> None:
        """From now on, one sequence after the other."""
        self.ragged = False
        self._own(self._seats)
        log.info("%s: one sequence at a time: %s", type(self.decoder.model).__name__, str(why))


def graph_size(sequences: int) -> int:
    """The next number of sequences for which there is a graph: 1, 2, 4, 8, 16, 32, 48 and so on."""
    return 1 << (sequences - 1).bit_length() if sequences <= 16 else -(-sequences // 16) * 16


def most_idle(sequences: int) -> int:
    """How many idle ones there may be beside at most so many, with the one that they begin with."""
    return 1 + max((graph_size(n) - n for n in range(1, sequences + 1)), default=0)


@contextmanager
def _or_back(cache: HostCache) -> Iterator[None]:
    """A token within, or the cache as it was."""
    length = cache.length
    if cache.states.host_states:  # models change these in place
        cache.checkpoint()
    try:
        yield
    except BaseException:
        cache.rewind(length)
        raise
