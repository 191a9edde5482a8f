"""What is kept of prefixes, in stores: written behind those who decode, and brought back.

A page of tokens is named in a store by its key. Its parts are what each kind of layers has of it,
`k<kind>-<number>`, and for each text that was kept and ends there, or within the next page, what
going on from it needs besides pages: `a-<digest of the tokens behind the page>-<length>`. So pages
are written once, whoever has them, and a window reads only those that it still sees.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from kvant.cache import Cache
from kvant.cache.pieces import Page, Pieces, page_sizes, pages_of, together
from kvant.contracts import Fields, Snapshot
from kvant.errors import SnapshotMismatch
from kvant.hf import HostCache
from kvant.prefixes.keys import PAGE, chain, digest
from kvant.stores import Blob, Tiers

log = logging.getLogger("kvant")

AT_ONCE = 4  # blobs that are read at a time
LITTLE = 20  # tokens behind the last page are worth a blob where they are more than such a part
REMEMBERED = 1 << 17  # names of blobs that are known to be there
LATELY = 0.5  # the weight of the newest measurement


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


@dataclass(eq=False)
class Write:
    """Pages of a cache that are to be written, unless their memory is needed before."""

    archive: Archive
    pieces: Pieces | None  # None: it was cancelled, or is done
    tokens: tuple[int, ...]
    prompt: int
    names: list[str]
    new: list[tuple[str, str, Page | None]]  # blobs, and of which page; None: of the rest
    sizes: tuple[int, ...]  # positions of a page, by kind
    about: Mapping[str, str]

    def __call__(self) -> None:
        names = list(dict.fromkeys(name for name, _, _ in self.new))
        there = dict(zip(names, self.archive.tiers.has(names), strict=True))
        for name, part, page in self.new:
            if part in there[name]:
                self.archive.know(name, part)
            elif (blob := self._blob(name, part, page)) is not None:
                self.archive.put(blob)
        self.cancel()

    def cancel(self) -> None:
        """Let go of the pages."""
        self.pieces = None

    def _blob(self, name: str, part: str, page: Page | None) -> Blob | None:
        pieces = self.pieces
        if pieces is None:
            return None
        if page is None:
            begin, end, held = (len(self.names) - 1) * PAGE, len(self.tokens), pieces.rest()
        else:
            size = self.sizes[page[0]]
            begin, end = page[1] * size, (page[1] + 1) * size
            held = Snapshot(pieces.page(*page), {})
        own, prompt = self.tokens[begin:end], min(self.prompt, end)
        before = self.names[begin // PAGE]
        return Blob(name, part, before, own, held.tensors, held.numbers, prompt, self.about)


class Archive:
    """Prefixes in stores, for any number of threads."""

    def __init__(self, tiers: Tiers, *, shared: bool = False) -> None:
        """`shared` ones are others' as well: they go on when this ends."""
        self.tiers = tiers
        self._shared = shared
        self._there: dict[str, set[str]] = {}  # parts that were written or read lately, by page
        self._threads = ThreadPoolExecutor(AT_ONCE, "kvant-restore")
        self._counts: Counter[str] = Counter()
        self._speed: float | None = None  # tokens a second that come back

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
        pieces, sizes = Pieces(cache), page_sizes(cache)
        new: list[tuple[str, str, Page | None]] = []
        for kind, numbers in enumerate(pieces.ranges):
            new += [
                (names[(number + 1) * sizes[kind] // PAGE], f"k{kind}-{number}", (kind, number))
                for number in numbers
                if upto is None or (number + 1) * sizes[kind] <= upto
            ]
        whole = upto is None or upto == len(tokens)
        if whole and (not suffice or len(tokens) % PAGE * LITTLE > len(tokens)):
            new.append((names[-1], _rest(tokens), None))
        new = [one for one in new if one[1] not in self._there.get(one[0], ())]
        write = Write(self, pieces, tuple(tokens), prompt, names, new, sizes, about)
        if new and not self.tiers.behind.add(sum(pieces.nbytes(page) for _, _, page in new), write):
            write.cancel()
        return write

    def put(self, blob: Blob) -> None:
        """Write a blob now."""
        if self.tiers.put(blob):
            self.know(blob.page, blob.part)

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
        parts_of = self.tiers.has(names[first:])
        for name, parts in zip(names[first:], parts_of, strict=True):
            if name in self._there:
                self._there[name] &= parts  # others may have dropped some
        sizes = page_sizes(cache)
        for count in range(len(names) - 1, first - 1, -1):
            parts, length = parts_of[count - first], count * PAGE
            most = min(len(tokens), length + PAGE - 1)
            for end in sorted({_end(part) for part in parts}, reverse=True):
                if length <= end <= most and end > beyond and _rest(tokens[:end]) in parts:
                    yield Found(end, tuple(names[: count + 1]), _rest(tokens[:end]))
            last = {
                f"k{kind}-{length // size - 1}"
                for kind, size in enumerate(sizes)
                if not length % size
            }
            if suffice and length > beyond and len(last) == len(sizes) and last <= parts:
                yield Found(length, tuple(names[: count + 1]), None)

    def read(
        self,
        found: Found,
        tokens: Sequence[int],
        memory: HostCache,
        device: torch.device,
        seconds: float = math.inf,
    ) -> Restored | None:
        """A cache of what was found, in pools of its own; what comes later than that is not used.

        `memory` is one of the same model and spec.
        """
        begin = time.perf_counter()
        try:
            restored = self._read(found, tokens, memory, device, seconds)
        except Exception as error:
            log.warning("a prefix of %d tokens was not restored: %r", found.length, error)
            self._counts["refused"] += 1
            if found.rest is not None and isinstance(error, SnapshotMismatch):
                self._drop(found.names[-1], found.rest)
            return None
        took = max(time.perf_counter() - begin, 1e-6)
        if restored is not None:
            self._counts["restored"] += 1
            self._counts["tokens_restored"] += len(restored.tokens)
            speed = len(restored.tokens) / took
            old = speed if self._speed is None else self._speed
            self._speed = LATELY * speed + (1 - LATELY) * old
        return restored

    def seconds(self, count: int) -> float:
        """How long it may take until so many tokens are there; nothing, before anybody knows."""
        return 0.0 if self._speed is None else count / self._speed

    def stats(self) -> dict[str, Any]:
        names = ("restored", "tokens_restored", "late", "refused")
        return {**{name: self._counts[name] for name in names}, **self.tiers.stats()}

    def close(self) -> None:
        """Write what waits."""
        if self._shared:
            self.tiers.behind.flush()
        else:
            self.tiers.behind.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- within

    def _read(
        self,
        found: Found,
        tokens: Sequence[int],
        memory: HostCache,
        device: torch.device,
        seconds: float,
    ) -> Restored | None:
        until = time.monotonic() + seconds
        empty = memory.fork()
        empty.reset()
        like, length, rest, prompt = empty.states, found.length, None, 0
        if found.rest is not None:
            begin = (len(found.names) - 1) * PAGE
            blob = self._get(found.names[-1], found.rest, tokens[begin:length])
            if blob is None:
                return None
            rest, prompt = Snapshot(blob.fields, blob.numbers), min(blob.prompt, length)
        pages: dict[Page, Fields] = {}
        sizes, read = page_sizes(like), length  # of all tokens, so many were read as prompts
        for page, one in self._pages(found, tokens, like, length, rest, until):
            if one is None:
                if found.rest is not None:
                    return None
                length = _before(page, sizes)
                break
            pages[page] = one.fields
            if one.prompt < (page[1] + 1) * sizes[page[0]]:
                read = min(read, page[1] * sizes[page[0]])
        if not length:
            return None
        whole = together(like, length, rest, pages)
        if device.type != "cpu":
            whole = Snapshot({k: x.to(device) for k, x in whole.tensors.items()}, whole.numbers)
        empty.restore(whole)
        if empty.length != length or empty.states.batch != 1:
            raise SnapshotMismatch(f"{empty.length} tokens, {length} are needed")
        prompt = min(read, length) if rest is None else min(read, prompt)
        return Restored(tuple(tokens[:length]), empty, prompt)

    def _pages(
        self,
        found: Found,
        tokens: Sequence[int],
        like: Cache,
        length: int,
        rest: Snapshot | None,
        until: float,
    ) -> Iterator[tuple[Page, Blob | None]]:
        """The pages that are needed, in order; None for the first that is not had in time."""
        sizes = page_sizes(like)
        wanted = sorted(
            (
                (kind, number)
                for kind, numbers in pages_of(like, length, rest).items()
                for number in numbers
            ),
            key=lambda page: (page[1] * sizes[page[0]], page[0]),
        )

        def ask(page: Page) -> Any:
            kind, number = page
            begin, end = number * sizes[kind], (number + 1) * sizes[kind]
            name = found.names[end // PAGE]
            return self._threads.submit(self._get, name, f"k{kind}-{number}", tokens[begin:end])

        coming = iter(wanted)
        asked = [(page, ask(page)) for page in islice(coming, 2 * AT_ONCE)]
        while asked:
            page, future = asked.pop(0)
            try:
                left = max(0.0, until - time.monotonic())
                blob = future.result(None if math.isinf(left) else left)
            except Late:
                self._counts["late"] += 1
                blob = None
            yield page, blob
            asked += [(page, ask(page)) for page in islice(coming, 1)]

    def _get(self, name: str, part: str, tokens: Sequence[int]) -> Blob | None:
        """A blob of these tokens."""
        blob = self.tiers.get(name, part)
        if blob is None or blob.tokens != tuple(tokens):
            if blob is not None:
                log.warning("%s %s is of other tokens", name, part)
                self._counts["refused"] += 1
                self.tiers.drop(name, part)
            self._there.pop(name, None)
            return None
        self.know(name, part)
        return blob

    def _drop(self, name: str, part: str) -> None:
        self._there.pop(name, None)
        self.tiers.drop(name, part)


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


def _before(page: Page, sizes: Sequence[int]) -> int:
    """The longest length that ends with a page of every kind, before this one."""
    largest = max(sizes)
    return page[1] * sizes[page[0]] // largest * largest
