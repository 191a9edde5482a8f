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
from kvant.cache.page_set import (
    PageId,
    PageSet,
    get_page_shapes,
    list_page_sizes,
    make_empty_tail_state,
)
from kvant.cache.restore_buffer import RestoreBuffer, check_rest
from kvant.contracts import Snapshot
from kvant.errors import BlobError, CacheError, SnapshotMismatch
from kvant.hf import TransformersCache
from kvant.prefixes.keys import PAGE_TOKENS, digest, make_page_keys
from kvant.prefixes.lookup_deadline import LookupDeadline
from kvant.prefixes.page_reader import MAX_RESTORE_THREADS, PageReader
from kvant.prefixes.restore_times import RestoreTimes
from kvant.prefixes.threads import Daemons
from kvant.stores import Blob, BlobLayout, BlobPayload, Tiers
from kvant.stores.tiers import Check

log = logging.getLogger("kvant")

CANCEL_TIMEOUT_S = 1.0  # seconds that cancelling a write waits for a copy in progress
MAX_COPY_BYTES = 8 << 20  # bytes of pages that are copied at a time for a write
MIN_TAIL_DIVISOR = 20  # a tail is written if it has more than this part of the prefix's tokens
MAX_KNOWN_PAGES = 1 << 14  # pages whose blobs are known to be there: about 400 bytes each


@dataclass(frozen=True)
class StoreHit:
    """Tokens that a store seems to have."""

    length: int
    page_names: tuple[str, ...]  # of their pages, behind that of no tokens
    tail_state_part: str | None  # the part of the last one that is not pages; None: pages suffice


@dataclass(frozen=True)
class RestoredPrefix:
    """A cache from a store."""

    tokens: tuple[int, ...]
    cache: TransformersCache
    num_prefilled: int  # of the tokens, so many were read as prompts


class PendingBlob(NamedTuple):
    """A blob that is to be written."""

    page_name: str  # of the page at which it ends
    part: str
    page: PageId | None  # None: what is no pages
    nbytes: int  # of it in memory; about those, without a page


@dataclass(eq=False)
class PrefixWrite:
    """What a store lacks of a cache, to be written unless its memory is needed before."""

    prefix_store: PrefixStore
    page_set: PageSet | None  # None: it was cancelled, or is done
    tokens: tuple[int, ...]
    num_prefilled: int
    page_names: list[str]
    pending: list[PendingBlob]
    metadata: Mapping[str, str]
    # Whoever copies pages has it; a collection of garbage in the middle of that may cancel us.
    _copy_lock: RLock = field(default_factory=RLock, init=False, repr=False)

    def __call__(self) -> Iterator[int]:
        """Write, some pages at a time; the bytes of each."""
        try:
            yield from self._write_blobs()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Let go of the pages, behind the copy that is under way: their memory is free then."""
        free = self._copy_lock.acquire(timeout=CANCEL_TIMEOUT_S)
        self.page_set = None
        if free:
            self._copy_lock.release()

    def _write_blobs(self) -> Iterator[int]:
        names = list(dict.fromkeys(one.page_name for one in self.pending))
        there = dict(zip(names, self.prefix_store.tiers.has(names), strict=True))
        lacking = []
        for one in self.pending:
            if one.part in there[one.page_name] and not self.prefix_store.doubts(one.page_name):
                self.prefix_store.record_part(one.page_name, one.part)
            else:
                lacking.append(one)
        for some in self._group_pending(lacking):
            for blob in self._copy_blobs(some):
                if self.page_set is None:
                    return
                self.prefix_store.put(blob)
                yield len(blob.payload.data)

    @staticmethod
    def _group_pending(pending: Sequence[PendingBlob]) -> Iterator[Sequence[PendingBlob]]:
        """Pages of a kind, so many that they are copied at once, and all else by itself."""
        for _, group in groupby(pending, lambda one: None if one.page is None else one.page[0]):
            some = list(group)
            at_once = max(1, MAX_COPY_BYTES // max(some[0].nbytes, 1))
            yield from (some[i : i + at_once] for i in range(0, len(some), at_once))

    def _copy_blobs(self, group: Sequence[PendingBlob]) -> list[Blob]:
        """Copies of some that belong together; none where it was cancelled."""
        with self._copy_lock:
            return [] if self.page_set is None else self._make_blobs(group, self.page_set)

    def _make_blobs(self, group: Sequence[PendingBlob], page_set: PageSet) -> list[Blob]:
        """Pages of one kind, or a rest."""
        pages = [one.page for one in group if one.page is not None]
        if not pages:
            rest, begin = page_set.snapshot_tail_state(), (len(self.page_names) - 1) * PAGE_TOKENS
            held = BlobPayload.from_fields(rest.tensors)
            return [self._make_blob(group[0], begin, len(self.tokens), held, rest.numbers)]
        kind = pages[0][0]
        size, layout = (
            page_set.layer_groups[kind].page,
            BlobLayout.from_shapes(get_page_shapes(page_set.cache, kind)),
        )
        data = torch.zeros(len(pages), layout.nbytes, dtype=torch.uint8)
        page_set.copy_pages(kind, [number for _, number in pages], layout.view_fields(data))
        return [
            self._make_blob(one, number * size, (number + 1) * size, BlobPayload(layout, held))
            for one, (_, number), held in zip(group, pages, data, strict=True)
        ]

    def _make_blob(
        self,
        pending: PendingBlob,
        begin: int,
        end: int,
        payload: BlobPayload,
        numbers: Mapping[str, int] | None = None,
    ) -> Blob:
        before, own, prompt = (
            self.page_names[begin // PAGE_TOKENS],
            self.tokens[begin:end],
            self.num_prefilled,
        )
        names = pending.page_name, pending.part, before
        return Blob(*names, own, payload, numbers or {}, min(prompt, end), self.metadata)


class PrefixStore:
    """Prefixes in stores, for any number of threads."""

    def __init__(self, tiers: Tiers, *, shared: bool = False) -> None:
        """`shared` ones are others' as well: they go on when this ends."""
        self.tiers = tiers
        self._shares_tiers = shared
        self._known_parts: dict[
            str, set[str]
        ] = {}  # parts that were written or read lately, by page
        self._doubted: set[str] = set()  # pages behind a blob that was missing or damaged
        self._rejected: set[str] = set()  # pages with which a model failed
        self._counts: Counter[str] = Counter()
        self.restore_times = RestoreTimes()

    # ---- writing

    def write(
        self,
        root: bytes,
        tokens: Sequence[int],
        cache: Cache,
        num_prefilled: int,
        metadata: Mapping[str, str],
        *,
        pages_suffice: bool,
        max_length: int | None = None,
    ) -> PrefixWrite:
        """Write later what is not there yet; the cache must not change.

        `upto` so many tokens, if not all. Where pages suffice, a few tokens behind the last one are
        not worth a blob.
        """
        names = _name_pages(root, tokens)
        pieces = PageSet(cache)
        new: list[PendingBlob] = []
        for kind, numbers in enumerate(pieces.page_ranges):
            size, nbytes = pieces.layer_groups[kind].page, pieces.nbytes((kind, 0))
            new += [
                PendingBlob(
                    names[(number + 1) * size // PAGE_TOKENS],
                    f"k{kind}-{number}",
                    (kind, number),
                    nbytes,
                )
                for number in numbers
                if max_length is None or (number + 1) * size <= max_length
            ]
        whole = max_length is None or max_length == len(tokens)
        if whole and (
            not pages_suffice
            or len(tokens) % max(list_page_sizes(cache)) * MIN_TAIL_DIVISOR > len(tokens)
        ):
            new.append(PendingBlob(names[-1], _name_tail_state(tokens), None, pieces.nbytes(None)))
        new = [one for one in new if one.part not in self._known_parts.get(one.page_name, ())]
        write = PrefixWrite(self, pieces, tuple(tokens), num_prefilled, names, new, metadata)
        if new and not self.tiers.writer.add(sum(one.nbytes for one in new), write):
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
            self.record_part(blob.page, blob.part)

    def reject(self, root: bytes, tokens: Sequence[int]) -> None:
        """Find nothing of these tokens until this process has written it anew."""
        names = _name_pages(root, tokens)
        if len(self._rejected) >= MAX_KNOWN_PAGES:
            self._rejected.clear()
        self._doubt(names)
        self._rejected.update(names)
        self._counts["refused"] += 1

    def doubts(self, name: str) -> bool:
        """Whether a blob of a page counts as written only once it was compared, or written."""
        return name in self._doubted

    def record_part(self, page_name: str, part: str) -> None:
        """That blob is there."""
        if len(self._known_parts) >= MAX_KNOWN_PAGES:
            self._known_parts.clear()
        self._known_parts.setdefault(page_name, set()).add(part)

    # ---- reading

    def find_hits(
        self,
        root: bytes,
        tokens: Sequence[int],
        cache: Cache,
        num_cached: int,
        *,
        pages_suffice: bool,
    ) -> Iterator[StoreHit]:
        """What there seems to be of the first of these tokens, more than `beyond`; longest first.

        `cache` is one like those that are kept, and may be empty.
        """
        names = _name_pages(root, tokens)
        first = num_cached // PAGE_TOKENS
        parts_of = [
            parts & self._known_parts.get(name, set()) if name in self._rejected else parts
            for name, parts in zip(names, self.tiers.has(names), strict=True)
        ]
        for name, parts in zip(names, parts_of, strict=True):
            if name in self._known_parts:
                self._known_parts[name] &= parts  # others may have dropped some
        sizes = list_page_sizes(cache)
        for count in range(len(names) - 1, first - 1, -1):
            parts, length = parts_of[count], count * PAGE_TOKENS
            most = min(len(tokens), length + PAGE_TOKENS - 1)
            for end in sorted({_parse_tail_length(part) for part in parts}, reverse=True):
                if (
                    length <= end <= most
                    and end > num_cached
                    and _name_tail_state(tokens[:end]) in parts
                ):
                    yield StoreHit(end, tuple(names[: count + 1]), _name_tail_state(tokens[:end]))
            last = {
                f"k{kind}-{length // size - 1}"
                for kind, size in enumerate(sizes)
                if not length % size
            }
            whole = len(last) == len(sizes) and last <= parts
            if (
                pages_suffice and whole and num_cached < length < len(tokens)
            ):  # one is read at least
                yield StoreHit(length, tuple(names[: count + 1]), None)

    def restore(
        self,
        hit: StoreHit,
        tokens: Sequence[int],
        base_cache: TransformersCache,
        device: torch.device,
        deadline: LookupDeadline,
    ) -> RestoredPrefix | None:
        """A cache of what was found, in the pools of `memory`; what comes too late is not used.

        That is one of the same model and spec, which has no tokens, or the first of these. Nothing
        of a blob is used before its shapes were compared with those of `memory`.
        """
        begin, seconds = time.perf_counter(), deadline.compute_seconds_left()
        try:
            restored = self._restore(hit, tokens, base_cache, device, deadline)
        except Exception as error:
            told = repr(error)  # whoever keeps the error keeps what came
            log.warning("a prefix of %d tokens was not restored: %s", hit.length, told)
            self._counts["refused"] += 1
            if isinstance(error, SnapshotMismatch) and not deadline.is_cancelled:
                self._doubt(hit.page_names)
                if hit.tail_state_part is not None:
                    self.tiers.drop(hit.page_names[-1], hit.tail_state_part)
            return None
        took = max(time.perf_counter() - begin, 1e-6)
        if restored is None and took >= seconds:  # it came too late
            self.restore_times.record_timeout(hit.length, took)
        if restored is not None:
            self._counts["restored"] += 1
            self._counts["tokens_restored"] += len(restored.tokens)
            if self._counts["restored"] > 1:  # the first one opens connections, and tells nothing
                self.restore_times.record_time(len(restored.tokens), took)
        return restored

    def stats(self) -> dict[str, Any]:
        names = ("restored", "tokens_restored", "late", "refused")
        return {**{name: self._counts[name] for name in names}, **self.tiers.stats()}

    def close(self, seconds: float | None = None) -> None:
        """Write what waits, so long at most, unless a store does not answer."""
        if self._shares_tiers:
            self.tiers.flush(seconds)
        else:
            self.tiers.close(seconds)

    # ---- within

    def _restore(
        self,
        hit: StoreHit,
        tokens: Sequence[int],
        base_cache: TransformersCache,
        device: torch.device,
        deadline: LookupDeadline,
    ) -> RestoredPrefix | None:
        if not base_cache.has_shapes:
            raise ValueError("the shapes of the model are not known: it is to read a token first")
        like, sizes = base_cache.states, list_page_sizes(base_cache.states)
        shapes = {kind: get_page_shapes(like, kind) for kind in range(len(sizes))}
        if hit.tail_state_part is None:
            rest, prompt = make_empty_tail_state(like, hit.length, shapes), hit.length
        else:
            place = len(hit.page_names) - 1
            own, check = (
                tokens[place * PAGE_TOKENS : hit.length],
                partial(_check_tail, like, hit.length),
            )
            tail = self._get_blob(hit, place, hit.tail_state_part, own, check)
            if tail is None:
                return None
            rest, prompt = Snapshot(tail.payload.fields, tail.numbers), tail.num_prefilled
        rest = Snapshot({k: x.to(device) for k, x in rest.tensors.items()}, rest.numbers)
        layouts = {kind: BlobLayout.from_shapes(some) for kind, some in shapes.items()}

        def get(page: PageId) -> Blob | None:
            kind, number = page
            begin, end = number * sizes[kind], (number + 1) * sizes[kind]
            check = partial(_check_page, layouts[kind])
            return self._get_blob(
                hit, end // PAGE_TOKENS, f"k{kind}-{number}", tokens[begin:end], check
            )

        arrival = deadline.allocate(lambda: RestoreBuffer(like, hit.length, rest))
        if arrival is None:
            return None
        with arrival:
            reading = PageReader(arrival, hit.length, sizes, layouts, get, device)
            threads = Daemons(
                MAX_RESTORE_THREADS, "kvant-restore"
            )  # of its own: a store may block them
            try:
                reached = reading.read_all(threads, deadline)
            finally:
                threads.end()
            self._counts["late"] += reading.is_late
            length = reached.length
            if length < hit.length:  # pages of every kind end there
                length = (
                    0 if hit.tail_state_part is not None else length // lcm(*sizes) * lcm(*sizes)
                )
            if not length:
                return None
            cache = base_cache.wrap_states(arrival.finish(length))
        return RestoredPrefix(
            tuple(tokens[:length]), cache, min(prompt, reached.num_prefilled, length)
        )

    def _get_blob(
        self, found: StoreHit, place: int, part: str, tokens: Sequence[int], check: Check
    ) -> Blob | None:
        """A blob of these tokens that passes a check, at a page of what was found."""

        def fits(blob: Blob) -> None:
            if blob.tokens != tuple(tokens):
                raise BlobError("it is of other tokens")
            check(blob)

        blob = self.tiers.get(found.page_names[place], part, fits)
        if blob is None:
            self._doubt(found.page_names)
        else:
            self.record_part(found.page_names[place], part)
        return blob

    def _doubt(self, names: Sequence[str]) -> None:
        """Compare what lies at these pages before it counts as written."""
        if len(self._doubted) >= MAX_KNOWN_PAGES:
            self._doubted.clear()
        self._doubted.update(names)
        for name in names:
            self._known_parts.pop(name, None)


def _check_page(layout: BlobLayout, blob: Blob) -> None:
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
    said = (there.parent_page, there.tokens, dict(there.numbers))
    if said != (blob.parent_page, blob.tokens, dict(blob.numbers)):
        raise BlobError("it is of other tokens, or of another length, than was written")


def _name_pages(root: bytes, tokens: Sequence[int]) -> list[str]:
    """Of the pages of tokens in a store, behind the name of none."""
    return [f"{root.hex()[:16]}/{key.hex()}" for key in make_page_keys(root, tokens)]


def _name_tail_state(tokens: Sequence[int]) -> str:
    """The part of a page that is what a text of these tokens needs besides pages."""
    behind = tokens[len(tokens) // PAGE_TOKENS * PAGE_TOKENS :]
    return (
        f"a-{digest(*(token.to_bytes(8, 'little') for token in behind)).hex()[:16]}-{len(tokens)}"
    )


def _parse_tail_length(part: str) -> int:
    """The length of the text that a rest is of; -1 for other parts."""
    kind, _, length = part.rpartition("-")
    return int(length) if kind.startswith("a-") and length.isdecimal() else -1
