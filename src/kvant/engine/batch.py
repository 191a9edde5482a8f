"""Sequences of one model whose caches share pages: prompts in chunks, and a token of each at once.

Those that decode lie under one cache (`kvant.merge`); others have one of their own, over the same
pools. Who comes or goes costs a merge or a selection of integers, and no copy of pages. A model
whose attention cannot read sequences of different lengths decodes them one after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from kvant.cache import merge
from kvant.cache.files import save
from kvant.errors import UnsupportedView
from kvant.generation import HostDecoder
from kvant.hf import HostCache, loaded
from kvant.recipes import CacheSpec

log = logging.getLogger("kvant")


@dataclass(eq=False)
class Seat:
    """A sequence: its tokens, and the cache that holds them, until it is one of the batch."""

    tokens: list[int]  # grows outside, a token before each decode
    cache: HostCache | None = field(default=None, repr=False)
    file: Path | None = None  # where its pages are while they are put aside


class Batch:
    """The memory of all sequences that one model is serving."""

    def __init__(self, decoder: HostDecoder, empty: HostCache, backend: str | None = None) -> None:
        self.decoder = decoder
        # Can sequences of different lengths be decoded at once? Else each by itself.
        self.ragged = not any(layer.foreign for layer in empty.described)
        self._empty = empty  # never has tokens: all others share its pools
        self._empty.backend = backend
        self._empty.widen(1)  # the token of a forward that died behind all layers is taken back
        self._seats: list[Seat] = []  # the sequences of the batch, in the order of its cache
        self._cache: HostCache | None = None  # the cache of the batch

    @property
    def spec(self) -> CacheSpec:
        return self._empty.spec

    def stats(self, seats: Sequence[Seat]) -> dict[str, int]:
        """Bytes of the pages, and of what recurrent layers keep of these sequences."""
        caches = {self._cache, *(seat.cache for seat in seats)}
        held = [cache.states.host_states for cache in caches if cache is not None]
        states = sum(state.nbytes for states in held for state in states)
        return self._empty.states.pooled() | {"nbytes_states": states}

    def read(self, seat: Seat, count: int) -> Tensor:
        """The logits [vocabulary] behind the next tokens of a prompt."""
        cache = self._empty.fork() if seat.cache is None else seat.cache
        held = cache.length
        logits = self.decoder.logits(seat.tokens[held : held + count], cache)[-1]
        seat.cache = cache
        self._share(cache)
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
        return Seat(list(seat.tokens), seat.cache.fork())

    def drop(self, seat: Seat) -> None:
        """Let a sequence go."""
        if seat in self._seats:
            self._keep([one for one in self._seats if one is not seat])
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
            self._share(seat.cache)

    def clear(self) -> None:
        """No sequence is left: free all memory."""
        self._seats, self._cache = [], None
        self._empty.clear()

    def check(self) -> None:
        """Are all slots free, or counted as often as they are held?"""
        self._empty.states.check()

    # ---- within

    @property
    def _shares(self) -> bool:
        """Are there pools to share? Before the first rows nobody knows how large pages are."""
        return any(leaf.storage is not None for _, leaf in self._empty.states.contents.attention())

    def _share(self, cache: HostCache) -> None:
        """Let others have the pools of this one, if it is the first."""
        if not self._shares:
            self._empty = cache.fork()
            self._empty.reset()

    def _together(self, seats: Sequence[Seat]) -> Tensor:
        """One forward for all of them."""
        cache = self._gathered(seats)
        ids = torch.tensor([[seat.tokens[-1]] for seat in self._seats])
        positions = torch.tensor([[len(seat.tokens) - 1] for seat in self._seats])
        with _or_back(cache):
            logits = self.decoder.rows(ids, positions, cache)
        order = [self._seats.index(seat) for seat in seats]
        return logits if order == list(range(len(order))) else logits[order]

    def _alone(self, seat: Seat) -> Tensor:
        self._own([seat])
        assert seat.cache is not None
        with _or_back(seat.cache):
            return self.decoder.logits(seat.tokens[-1:], seat.cache)

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
        self._keep([seat for seat in self._seats if seat not in here])

    def _keep(self, seats: list[Seat]) -> None:
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
