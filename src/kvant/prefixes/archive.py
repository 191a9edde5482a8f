"""What is kept of prefixes, in stores: written behind those who decode, and brought back.

A page of tokens is named in a store by its key. Its parts are what each kind of layers has of it,
`k<kind>-<number>`, and for each text that was kept and ends there, or within the next page, what
going on from it needs besides pages: `a-<digest of the tokens behind the page>-<length>`. So pages
are written once, whoever has them, and a window reads only those that it still sees.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from math import lcm
from threading import RLock
from typing import Any, NamedTuple

import torch

from kvant.cache import Cache
from kvant.cache.arrival import Arrival, check_rest
from kvant.cache.pieces import (
    Page,
    Pieces,
    bare,
    page_sizes,
    shapes_of,
)
from kvant.contracts import Snapshot
from kvant.errors import BlobError, CacheError, SnapshotMismatch
from kvant.hf import HostCache
from kvant.prefixes.keys import PAGE, chain, digest
from kvant.prefixes.reading import AT_ONCE, Reading
from kvant.prefixes.restores import Restores
from kvant.prefixes.threads import Daemons
from kvant.prefixes.waiting import Waiting
from kvant.stores import Blob, Layout, Payload, Tiers
from kvant.stores.tiers import Check

log = logging.getLogger("kvant")

PATIENCE = 1.0  # seconds that whoever cancels a write waits for a copy
COPIED = 8 << 20  # bytes of pages that are copied at once, to be written
LITTLE = 20  # tokens behind the last page are worth a blob where they are more than such a part
REMEMBERED = 1 << 14  # pages whose blobs are known to be there: about 400 bytes each


@dataclass(frozen=True)
class Found:
    """Tokens that a store seems to have."""

    length: int
    names: tuple[str, ...]  # of their pages, behind that of no tokens
    rest: str | None  # the part of the last one that is not pages; None: pages suffice


@dataclass(frozen=True)
class Restored:
    """A cache from a store."""

    tokens: tuple[int, ...]
    cache: HostCache
    prompt: int  # of the tokens, so many were read as prompts


class Due(NamedTuple):
    """A blob that is to be written."""

    name: str  # of the page at which it ends
    part: str
    page: Page | None  # None: what is no pages
    nbytes: int  # of it in memory; about those, without a page


@dataclass(eq=False)
class Write:
    """What a store lacks of a cache, to be written unless its memory is needed before."""

    archive: Archive
    pieces: Pieces | None  # None: it was cancelled, or is done
    tokens: tuple[int, ...]
    prompt: int
    names: list[str]
    due: list[Due]
    about: Mapping[str, str]
    # Whoever copies pages has it; a collection of garbage in the middle of that may cancel us.
    _copying: RLock = field(default_factory=RLock, init=False, repr=False)

    def __call__(self) -> Iterator[int]:
        """Write, some pages at a time; the bytes of each."""
        try:
            yield from self._written()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Let go of the pages, behind the copy that is under way: their memory is free then."""
        free = self._copying.acquire(timeout=PATIENCE)
        self.pieces = None
        if free:
            self._copying.release()

    def _written(self) -> Iterator[int]:
        names = list(dict.fromkeys(one.name for one in self.due))
        there = dict(zip(names, self.archive.tiers.has(names), strict=True))
        lacking = []
        for one in self.due:
            if one.part in there[one.name] and not self.archive.doubts(one.name):
                self.archive.know(one.name, one.part)
            else:
                lacking.append(one)
        for some in self._together(lacking):
            for blob in self._copies(some):
                if self.pieces is None:
                    return
                self.archive.put(blob)
                yield len(blob.payload.data)

    @staticmethod
    def _together(due: Sequence[Due]) -> Iterator[Sequence[Due]]:
        """Pages of a kind, so many that they are copied at once, and all else by itself."""
        for _, group in groupby(due, lambda one: None if one.page is None else one.page[0]):
            some = list(group)
            at_once = max(1, COPIED // max(some[0].nbytes, 1))
            yield from (some[i : i + at_once] for i in range(0, len(some), at_once))

    def _copies(self, some: Sequence[Due]) -> list[Blob]:
        """Copies of some that belong together; none where it was cancelled."""
        with self._copying:
            return [] if self.pieces is None else self._blobs(some, self.pieces)

    def _blobs(self, some: Sequence[Due], pieces: Pieces) -> list[Blob]:
        """Pages of one kind, or a rest."""
        pages = [one.page for one in some if one.page is not None]
        if not pages:
            rest, begin = pieces.rest(), (len(self.names) - 1) * PAGE
            held = Payload.of(rest.tensors)
            return [self._blob(some[0], begin, len(self.tokens), held, rest.numbers)]
        kind = pages[0][0]
        size, layout = pieces.kinds[kind].page, Layout.of(shapes_of(pieces.cache, kind))
        data = torch.zeros(len(pages), layout.nbytes, dtype=torch.uint8)
        pieces.copy(kind, [number for _, number in pages], layout.fields(data))
        return [
            self._blob(one, number * size, (number + 1) * size, Payload(layout, held))
            for one, (_, number), held in zip(some, pages, data, strict=True)
        ]

    def _blob(
        self,
        due: Due,
        begin: int,
        end: int,
        held: Payload,
        numbers: Mapping[str, int] | None = None,
    ) -> Blob:
        before, own, prompt = self.names[begin // PAGE], self.tokens[begin:end], self.prompt
        names = due.name, due.part, before
        return Blob(*names, own, held, numbers or {}, min(prompt, end), self.about)


class Archive:
    """Prefixes in stores, for any number of threads."""

    def __init__(self, tiers: Tiers, *, shared: bool = False) -> None:
        """`shared` ones are others' as well: they go on when this ends."""
        self.tiers = tiers
        self._shared = shared
        self._there: dict[str, set[str]] = {}  # parts that were written or read lately, by page
        self._doubted: set[str] = set()  # pages behind a blob that was missing or damaged
        self._rejected: set[str] = set()  # pages with which a model failed
        self._counts: Counter[str] = Counter()
        self.restores = Restores()

    # ---- writing

    def write(
        self,
        root: bytes,
        tokens: Sequence[int],
        cache: Cache,
        prompt: int,
        about: Mapping[str, str],
        *,
        suffice: bool,
        upto: int | None = None,
    ) -> Write:
        """Write later what is not there yet; the cache must not change.

        `upto` so many tokens, if not all. Where pages suffice, a few tokens behind the last one are
        not worth a blob.
        """
        names = _names(root, tokens)
        pieces = Pieces(cache)
        new: list[Due] = []
        for kind, numbers in enumerate(pieces.ranges):
            size, nbytes = pieces.kinds[kind].page, pieces.nbytes((kind, 0))
            new += [
                Due(names[(number + 1) * size // PAGE], f"k{kind}-{number}", (kind, number), nbytes)
                for number in numbers
                if upto is None or (number + 1) * size <= upto
            ]
        whole = upto is None or upto == len(tokens)
        if whole and (not suffice or len(tokens) % max(page_sizes(cache)) * LITTLE > len(tokens)):
            new.append(Due(names[-1], _rest(tokens), None, pieces.nbytes(None)))
        new = [one for one in new if one.part not in self._there.get(one.name, ())]
        write = Write(self, pieces, tuple(tokens), prompt, names, new, about)
        if new and not self.tiers.behind.add(sum(one.nbytes for one in new), write):
            write.cancel()
        return write

    def put(self, blob: Blob) -> None:
        """Write a blob now, unless a doubtful page turns out to have the same."""
        same = None
        if blob.page in self._rejected:
            self.tiers.drop(blob.page, blob.part)
        elif self.doubts(blob.page):
            same = self.tiers.get(blob.page, blob.part, partial(_check_same, blob))
        if same is not None or self.tiers.put(blob):
            self.know(blob.page, blob.part)

    def reject(self, root: bytes, tokens: Sequence[int]) -> None:
        """Find nothing of these tokens until this process has written it anew."""
        names = _names(root, tokens)
        if len(self._rejected) >= REMEMBERED:
            self._rejected.clear()
        self._doubt(names)
        self._rejected.update(names)
        self._counts["refused"] += 1

    def doubts(self, name: str) -> bool:
        """Whether a blob of a page counts as written only once it was compared, or written."""
        return name in self._doubted

    def know(self, name: str, part: str) -> None:
        """That blob is there."""
        if len(self._there) >= REMEMBERED:
            self._there.clear()
        self._there.setdefault(name, set()).add(part)

    # ---- reading

    def find(
        self, root: bytes, tokens: Sequence[int], cache: Cache, beyond: int, *, suffice: bool
    ) -> Iterator[Found]:
        """What there seems to be of the first of these tokens, more than `beyond`; longest first.

        `cache` is one like those that are kept, and may be empty.
        """
        names = _names(root, tokens)
        first = beyond // PAGE
        parts_of = [
            parts & self._there.get(name, set()) if name in self._rejected else parts
            for name, parts in zip(names, self.tiers.has(names), strict=True)
        ]
        for name, parts in zip(names, parts_of, strict=True):
            if name in self._there:
                self._there[name] &= parts  # others may have dropped some
        sizes = page_sizes(cache)
        for count in range(len(names) - 1, first - 1, -1):
            parts, length = parts_of[count], count * PAGE
            most = min(len(tokens), length + PAGE - 1)
            for end in sorted({_end(part) for part in parts}, reverse=True):
                if length <= end <= most and end > beyond and _rest(tokens[:end]) in parts:
                    yield Found(end, tuple(names[: count + 1]), _rest(tokens[:end]))
            last = {
                f"k{kind}-{length // size - 1}"
                for kind, size in enumerate(sizes)
                if not length % size
            }
            whole = len(last) == len(sizes) and last <= parts
            if suffice and whole and beyond < length < len(tokens):  # one is read at least
                yield Found(length, tuple(names[: count + 1]), None)

    def read(
        self,
        found: Found,
        tokens: Sequence[int],
        memory: HostCache,
        device: torch.device,
        waiting: Waiting,
    ) -> Restored | None:
        """A cache of what was found, in the pools of `memory`; what comes too late is not used.

        That is one of the same model and spec, which has no tokens, or the first of these. Nothing
        of a blob is used before its shapes were compared with those of `memory`.
        """
        begin, seconds = time.perf_counter(), waiting.left()
        try:
            restored = self._read(found, tokens, memory, device, waiting)
        except Exception as error:
            told = repr(error)  # whoever keeps the error keeps what came
            log.warning("a prefix of %d tokens was not restored: %s", found.length, told)
            self._counts["refused"] += 1
            if isinstance(error, SnapshotMismatch) and not waiting.over:
                self._doubt(found.names)
                if found.rest is not None:
                    self.tiers.drop(found.names[-1], found.rest)
            return None
        took = max(time.perf_counter() - begin, 1e-6)
        if restored is None and took >= seconds:  # it came too late
            self.restores.late(found.length, took)
        if restored is not None:
            self._counts["restored"] += 1
            self._counts["tokens_restored"] += len(restored.tokens)
            if self._counts["restored"] > 1:  # the first one opens connections, and tells nothing
                self.restores.came(len(restored.tokens), took)
        return restored

    def stats(self) -> dict[str, Any]:
        names = ("restored", "tokens_restored", "late", "refused")
        return {**{name: self._counts[name] for name in names}, **self.tiers.stats()}

    def close(self, seconds: float | None = None) -> None:
        """Write what waits, so long at most, unless a store does not answer."""
        if self._shared:
            self.tiers.flush(seconds)
        else:
            self.tiers.close(seconds)

    # ---- within

    def _read(
        self,
        found: Found,
        tokens: Sequence[int],
        memory: HostCache,
        device: torch.device,
        waiting: Waiting,
    ) -> Restored | None:
        if not memory.has_shapes:
            raise ValueError("the shapes of the model are not known: it is to read a token first")
        like, sizes = memory.states, page_sizes(memory.states)
        shapes = {kind: shapes_of(like, kind) for kind in range(len(sizes))}
        if found.rest is None:
            rest, prompt = bare(like, found.length, shapes), found.length
        else:
            place = len(found.names) - 1
            own, check = (
                tokens[place * PAGE : found.length],
                partial(_check_tail, like, found.length),
            )
            tail = self._get(found, place, found.rest, own, check)
            if tail is None:
                return None
            rest, prompt = Snapshot(tail.payload.fields, tail.numbers), tail.prompt
        rest = Snapshot({k: x.to(device) for k, x in rest.tensors.items()}, rest.numbers)
        layouts = {kind: Layout.of(some) for kind, some in shapes.items()}

        def get(page: Page) -> Blob | None:
            kind, number = page
            begin, end = number * sizes[kind], (number + 1) * sizes[kind]
            check = partial(_check_page, layouts[kind])
            return self._get(found, end // PAGE, f"k{kind}-{number}", tokens[begin:end], check)

        arrival = waiting.hold(lambda: Arrival(like, found.length, rest))
        if arrival is None:
            return None
        with arrival:
            reading = Reading(arrival, found.length, sizes, layouts, get, device)
            threads = Daemons(AT_ONCE, "kvant-restore")  # of its own: a store may block them
            try:
                reached = reading.all(threads, waiting)
            finally:
                threads.end()
            self._counts["late"] += reading.late
            length = reached.length
            if length < found.length:  # pages of every kind end there
                length = 0 if found.rest is not None else length // lcm(*sizes) * lcm(*sizes)
            if not length:
                return None
            cache = memory.around(arrival.settled(length))
        return Restored(tuple(tokens[:length]), cache, min(prompt, reached.prompt, length))

    def _get(
        self, found: Found, place: int, part: str, tokens: Sequence[int], check: Check
    ) -> Blob | None:
        """A blob of these tokens that passes a check, at a page of what was found."""

        def fits(blob: Blob) -> None:
            if blob.tokens != tuple(tokens):
                raise BlobError("it is of other tokens")
            check(blob)

        blob = self.tiers.get(found.names[place], part, fits)
        if blob is None:
            self._doubt(found.names)
        else:
            self.know(found.names[place], part)
        return blob

    def _doubt(self, names: Sequence[str]) -> None:
        """Compare what lies at these pages before it counts as written."""
        if len(self._doubted) >= REMEMBERED:
            self._doubted.clear()
        self._doubted.update(names)
        for name in names:
            self._there.pop(name, None)


def _check_page(layout: Layout, blob: Blob) -> None:
    if blob.payload.layout != layout:
        raise BlobError("it has other tensors than pages of this model")


def _check_tail(like: Cache, length: int, blob: Blob) -> None:
    try:
        check_rest(like, length, Snapshot(blob.payload.fields, blob.numbers))
    except (CacheError, ValueError) as error:
        raise BlobError(f"it does not fit this model: {error}") from error


def _check_same(blob: Blob, there: Blob) -> None:
    """Refuse a blob that is not the same but for rounding."""
    if there.payload.layout != blob.payload.layout:
        raise BlobError("it has other tensors than were written")
    said = (there.before, there.tokens, dict(there.numbers))
    if said != (blob.before, blob.tokens, dict(blob.numbers)):
        raise BlobError("it is of other tokens, or of another length, than was written")


def _names(root: bytes, tokens: Sequence[int]) -> list[str]:
    """Of the pages of tokens in a store, behind the name of none."""
    return [f"{root.hex()[:16]}/{key.hex()}" for key in chain(root, tokens)]


def _rest(tokens: Sequence[int]) -> str:
    """The part of a page that is what a text of these tokens needs besides pages."""
    behind = tokens[len(tokens) // PAGE * PAGE :]
    return (
        f"a-{digest(*(token.to_bytes(8, 'little') for token in behind)).hex()[:16]}-{len(tokens)}"
    )


def _end(part: str) -> int:
    """The length of the text that a rest is of; -1 for other parts."""
    kind, _, length = part.rpartition("-")
    return int(length) if kind.startswith("a-") and length.isdecimal() else -1
