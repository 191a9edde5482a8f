"""Write prefixes to stores in the background, find them there, and restore them.

A prefix is stored as blobs. A blob is found by the name of a token page (64 tokens) and a part
name. A KV page of a layer group has one or more token pages, and is filed under the last of them:

    page name   <16 hex digits of the root key>/<page key>
    k0-3        KV page 3 of layer group 0
    a-<digest of the tail tokens>-<length>
                tail state of a prefix of this length: what resuming it needs besides KV pages;
                filed under its last whole token page

So each KV page is written once for all prefixes that share it, and a restore with a window reads
only the pages that the window still sees.
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
from kvant.cache.restore_buffer import RestoreBuffer, check_tail_state
from kvant.contracts import Snapshot
from kvant.errors import BlobError, CacheError, SnapshotMismatch
from kvant.hf import TransformersCache
from kvant.prefixes.keys import PAGE_TOKENS, digest, make_page_keys
from kvant.prefixes.restore import (
    MAX_RESTORE_THREADS,
    LookupDeadline,
    PageReader,
    RestoreTimes,
)
from kvant.prefixes.threads import DaemonExecutor
from kvant.stores import Blob, BlobLayout, BlobPayload, Tiers
from kvant.stores.tiers import Check

log = logging.getLogger("kvant")

CANCEL_TIMEOUT_S = 1.0  # seconds that cancelling a write waits for a copy in progress
MAX_COPY_BYTES = 8 << 20  # of pages that are copied at a time for a write
MIN_TAIL_DIVISOR = 20  # a tail is written if it has more than 1 / 20 of the prefix's tokens
MAX_KNOWN_PAGES = 1 << 14  # page names that are remembered per purpose: about 400 bytes each


@dataclass(frozen=True)
class StoreHit:
    """A prefix that a store seems to have; its blobs are not read yet."""

    length: int
    page_names: tuple[str, ...]  # of the root, then of each whole token page
    tail_state_part: str | None  # part of the last page name; None: pages suffice


@dataclass(frozen=True)
class RestoredPrefix:
    """A cache that was restored from a store."""

    tokens: tuple[int, ...]
    cache: TransformersCache
    num_prefilled: int  # first tokens that were prefilled, not decoded


class PendingBlob(NamedTuple):
    """A blob of a prefix that may have to be written."""

    page_name: str  # of the token page at which it ends
    part: str
    page: PageId | None  # None: the tail state
    nbytes: int  # in memory; an estimate for a tail state


@dataclass(eq=False)
class PrefixWrite:
    """A queued write of the blobs that a store lacks; an eviction may cancel it."""

    prefix_store: PrefixStore
    page_set: PageSet | None  # references the pages; None: cancelled or done
    tokens: tuple[int, ...]
    num_prefilled: int
    page_names: list[str]
    pending: list[PendingBlob]
    metadata: Mapping[str, str]
    # Held while pages are copied. Reentrant: a garbage collection in a copy may cancel the write.
    _copy_lock: RLock = field(default_factory=RLock, init=False, repr=False)

    def __call__(self) -> Iterator[int]:
        """Write the blobs one by one; yield the bytes of each."""
        try:
            yield from self._write_blobs()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Release the pages, after a copy in progress."""
        is_locked = self._copy_lock.acquire(timeout=CANCEL_TIMEOUT_S)
        self.page_set = None
        if is_locked:
            self._copy_lock.release()

    def _write_blobs(self) -> Iterator[int]:
        names = list(dict.fromkeys(blob.page_name for blob in self.pending))
        stored_parts = dict(zip(names, self.prefix_store.tiers.has(names), strict=True))
        missing = []
        for pending in self.pending:
            name, part = pending.page_name, pending.part
            if part in stored_parts[name] and not self.prefix_store.is_suspect(name):
                self.prefix_store.record_part(name, part)
            else:
                missing.append(pending)
        for batch in self._split_into_batches(missing):
            for blob in self._copy_blobs(batch):
                if self.page_set is None:
                    return
                self.prefix_store.put(blob)
                yield len(blob.payload.data)

    @staticmethod
    def _split_into_batches(blobs: Sequence[PendingBlob]) -> Iterator[Sequence[PendingBlob]]:
        """Yield batches to copy at once: pages of one layer group, or a tail state."""
        for _, run in groupby(blobs, lambda blob: None if blob.page is None else blob.page[0]):
            same_group = list(run)
            size = max(1, MAX_COPY_BYTES // max(same_group[0].nbytes, 1))
            yield from (same_group[i : i + size] for i in range(0, len(same_group), size))

    def _copy_blobs(self, batch: Sequence[PendingBlob]) -> list[Blob]:
        """Copy a batch of blobs out of the cache; [] after a cancel."""
        with self._copy_lock:
            return [] if self.page_set is None else self._make_blobs(batch, self.page_set)

    def _make_blobs(self, batch: Sequence[PendingBlob], page_set: PageSet) -> list[Blob]:
        """Make blobs of pages of one layer group, or of a tail state."""
        pages = [pending.page for pending in batch if pending.page is not None]
        if not pages:
            tail, begin = page_set.snapshot_tail_state(), (len(self.page_names) - 1) * PAGE_TOKENS
            payload = BlobPayload.from_fields(tail.tensors)
            return [self._make_blob(batch[0], begin, len(self.tokens), payload, tail.numbers)]
        layer_group = pages[0][0]
        size = page_set.layer_groups[layer_group].page
        layout = BlobLayout.from_shapes(get_page_shapes(page_set.cache, layer_group))
        data = torch.zeros(len(pages), layout.nbytes, dtype=torch.uint8)
        page_numbers = [number for _, number in pages]
        page_set.copy_pages(layer_group, page_numbers, layout.view_fields(data))
        return [
            self._make_blob(pending, number * size, (number + 1) * size, BlobPayload(layout, row))
            for pending, number, row in zip(batch, page_numbers, data, strict=True)
        ]

    def _make_blob(
        self,
        pending: PendingBlob,
        begin: int,
        end: int,
        payload: BlobPayload,
        numbers: Mapping[str, int] | None = None,
    ) -> Blob:
        name, parent_name = pending.page_name, self.page_names[begin // PAGE_TOKENS]
        tokens, num_prefilled = self.tokens[begin:end], min(self.num_prefilled, end)
        header = name, pending.part, parent_name, tokens
        return Blob(*header, payload, numbers or {}, num_prefilled, self.metadata)


class PrefixStore:
    """Prefixes in stores: queued writes, lookups and restores; for any number of threads."""

    def __init__(self, tiers: Tiers, *, shared: bool = False) -> None:
        """`shared` tiers have other users: `close` leaves them open."""
        self.tiers = tiers
        self._shares_tiers = shared
        self._known_parts: dict[str, set[str]] = {}  # recently written or read, by page name
        self._suspect_pages: set[str] = set()  # of prefixes with a missing or corrupt blob
        self._rejected_pages: set[str] = set()  # on which a model failed
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
        """Queue a write of the blobs that the store lacks; the cache must not change.

        `max_length` limits the tokens. If pages suffice, a short tail is not written.
        """
        names = _name_pages(root, tokens)
        page_set = PageSet(cache)
        pending: list[PendingBlob] = []
        for group, numbers in enumerate(page_set.page_ranges):
            size, nbytes = page_set.layer_groups[group].page, page_set.nbytes((group, 0))
            for number in numbers:
                end = (number + 1) * size
                if max_length is None or end <= max_length:
                    name, part = names[end // PAGE_TOKENS], f"k{group}-{number}"
                    pending.append(PendingBlob(name, part, (group, number), nbytes))
        is_whole = max_length is None or max_length == len(tokens)
        tail_length = len(tokens) % max(list_page_sizes(cache))
        if is_whole and (not pages_suffice or tail_length * MIN_TAIL_DIVISOR > len(tokens)):
            part, nbytes = _name_tail_state(tokens), page_set.nbytes(None)
            pending.append(PendingBlob(names[-1], part, None, nbytes))
        pending = [b for b in pending if b.part not in self._known_parts.get(b.page_name, ())]
        write = PrefixWrite(self, page_set, tuple(tokens), num_prefilled, names, pending, metadata)
        if pending and not self.tiers.writer.add(sum(blob.nbytes for blob in pending), write):
            write.cancel()
        return write

    def put(self, blob: Blob) -> None:
        """Write a blob now; at a suspect page, only if the stored blob differs.

        At a rejected page, the stored blob is dropped first.
        """
        stored = None
        if blob.page in self._rejected_pages:
            self.tiers.drop(blob.page, blob.part)
        elif self.is_suspect(blob.page):
            stored = self.tiers.get(blob.page, blob.part, partial(_check_same, blob))
        if stored is not None or self.tiers.put(blob):
            self.record_part(blob.page, blob.part)

    def reject(self, root: bytes, tokens: Sequence[int]) -> None:
        """Ignore stored blobs of these tokens until this process has written them again."""
        names = _name_pages(root, tokens)
        if len(self._rejected_pages) >= MAX_KNOWN_PAGES:
            self._rejected_pages.clear()
        self._mark_suspect(names)
        self._rejected_pages.update(names)
        self._counts["refused"] += 1

    def is_suspect(self, page_name: str) -> bool:
        """Return whether blobs of a page must be compared before they count as written."""
        return page_name in self._suspect_pages

    def record_part(self, page_name: str, part: str) -> None:
        """Note that the stores have a blob."""
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
        """Yield stored prefixes of `tokens` longer than `num_cached`, longest first.

        `cache` has the layer groups of the model; it may be empty.
        """
        names = _name_pages(root, tokens)
        num_cached_pages = num_cached // PAGE_TOKENS
        parts_by_page = [
            parts & self._known_parts.get(name, set()) if name in self._rejected_pages else parts
            for name, parts in zip(names, self.tiers.has(names), strict=True)
        ]
        for name, parts in zip(names, parts_by_page, strict=True):
            if name in self._known_parts:
                self._known_parts[name] &= parts  # a store may have dropped some
        sizes = list_page_sizes(cache)
        for count in range(len(names) - 1, num_cached_pages - 1, -1):
            parts, length = parts_by_page[count], count * PAGE_TOKENS
            page_names = tuple(names[: count + 1])
            max_end = min(len(tokens), length + PAGE_TOKENS - 1)
            for end in sorted({_parse_tail_length(part) for part in parts}, reverse=True):
                if length <= end <= max_end and end > num_cached:
                    tail_part = _name_tail_state(tokens[:end])
                    if tail_part in parts:
                        yield StoreHit(end, page_names, tail_part)
            last_parts = {
                f"k{group}-{length // size - 1}"
                for group, size in enumerate(sizes)
                if not length % size
            }
            has_last_pages = len(last_parts) == len(sizes) and last_parts <= parts
            is_usable = num_cached < length < len(tokens)  # one token is left to prefill
            if pages_suffice and has_last_pages and is_usable:
                yield StoreHit(length, page_names, None)

    def restore(
        self,
        hit: StoreHit,
        tokens: Sequence[int],
        base_cache: TransformersCache,
        device: torch.device,
        deadline: LookupDeadline,
    ) -> RestoredPrefix | None:
        """Restore a hit into the pools of `base_cache`; None if it fails or is late.

        `base_cache` is of the same model and spec, and empty or with the first tokens. The shapes
        in a blob are compared with those of `base_cache` before any tensor is used.
        """
        begin, seconds = time.perf_counter(), deadline.compute_seconds_left()
        try:
            restored = self._restore(hit, tokens, base_cache, device, deadline)
        except Exception as error:
            text = repr(error)  # a log handler may keep the error, whose traceback holds tensors
            log.warning("a prefix of %d tokens was not restored: %s", hit.length, text)
            self._counts["refused"] += 1
            if isinstance(error, SnapshotMismatch) and not deadline.is_cancelled:
                self._mark_suspect(hit.page_names)
                if hit.tail_state_part is not None:
                    self.tiers.drop(hit.page_names[-1], hit.tail_state_part)
            return None
        elapsed = max(time.perf_counter() - begin, 1e-6)
        if restored is None and elapsed >= seconds:
            self.restore_times.record_timeout(hit.length, elapsed)
        if restored is not None:
            self._counts["restored"] += 1
            self._counts["tokens_restored"] += len(restored.tokens)
            if self._counts["restored"] > 1:  # the first restore also opens connections
                self.restore_times.record_time(len(restored.tokens), elapsed)
        return restored

    def stats(self) -> dict[str, Any]:
        names = ("restored", "tokens_restored", "late", "refused")
        return {**{name: self._counts[name] for name in names}, **self.tiers.stats()}

    def flush(self, seconds: float | None = None) -> bool:
        """Wait `seconds` at most for queued writes; return whether all are done."""
        return self.tiers.flush(seconds)

    def close(self, seconds: float | None = None) -> None:
        """Wait `seconds` at most for queued writes; a store that does not answer ends the wait."""
        if self._shares_tiers:
            self.tiers.flush(seconds)
        else:
            self.tiers.close(seconds)

    # ---- internals

    def _restore(
        self,
        hit: StoreHit,
        tokens: Sequence[int],
        base_cache: TransformersCache,
        device: torch.device,
        deadline: LookupDeadline,
    ) -> RestoredPrefix | None:
        if not base_cache.has_shapes:
            raise ValueError("the shapes of the model are unknown: prefill a token first")
        template, sizes = base_cache.states, list_page_sizes(base_cache.states)
        shapes = {group: get_page_shapes(template, group) for group in range(len(sizes))}
        if hit.tail_state_part is None:
            tail_state = make_empty_tail_state(template, hit.length, shapes)
            num_prefilled = hit.length
        else:
            index = len(hit.page_names) - 1
            tail_tokens = tokens[index * PAGE_TOKENS : hit.length]
            check = partial(_check_tail, template, hit.length)
            tail = self._get_blob(hit, index, hit.tail_state_part, tail_tokens, check)
            if tail is None:
                return None
            tail_state = Snapshot(tail.payload.fields, tail.numbers)
            num_prefilled = tail.num_prefilled
        tensors = {name: tensor.to(device) for name, tensor in tail_state.tensors.items()}
        tail_state = Snapshot(tensors, tail_state.numbers)
        layouts = {group: BlobLayout.from_shapes(fields) for group, fields in shapes.items()}

        def get_page(page: PageId) -> Blob | None:
            group, number = page
            begin, end = number * sizes[group], (number + 1) * sizes[group]
            part, check = f"k{group}-{number}", partial(_check_page, layouts[group])
            return self._get_blob(hit, end // PAGE_TOKENS, part, tokens[begin:end], check)

        buffer = deadline.allocate(lambda: RestoreBuffer(template, hit.length, tail_state))
        if buffer is None:
            return None
        with buffer:
            reader = PageReader(buffer, hit.length, sizes, layouts, get_page, device)
            executor = DaemonExecutor(MAX_RESTORE_THREADS, "kvant-restore")  # a store may block it
            try:
                progress = reader.read_all(executor, deadline)
            finally:
                executor.shutdown()
            self._counts["late"] += reader.is_late
            length = progress.length
            if length < hit.length:  # round down to a length at which pages of all groups end
                can_be_shorter = hit.tail_state_part is None
                length = length // lcm(*sizes) * lcm(*sizes) if can_be_shorter else 0
            if not length:
                return None
            cache = base_cache.wrap_states(buffer.finish(length))
        num_prefilled = min(num_prefilled, progress.num_prefilled, length)
        return RestoredPrefix(tuple(tokens[:length]), cache, num_prefilled)

    def _get_blob(
        self, hit: StoreHit, index: int, part: str, tokens: Sequence[int], check: Check
    ) -> Blob | None:
        """Read and check a blob of a hit; if it fails, mark all pages of the hit suspect."""

        def check_blob(blob: Blob) -> None:
            if blob.tokens != tuple(tokens):
                raise BlobError("it has other tokens")
            check(blob)

        blob = self.tiers.get(hit.page_names[index], part, check_blob)
        if blob is None:
            self._mark_suspect(hit.page_names)
        else:
            self.record_part(hit.page_names[index], part)
        return blob

    def _mark_suspect(self, names: Sequence[str]) -> None:
        """Make later writes compare the stored blobs of these pages instead of trusting them."""
        if len(self._suspect_pages) >= MAX_KNOWN_PAGES:
            self._suspect_pages.clear()
        self._suspect_pages.update(names)
        for name in names:
            self._known_parts.pop(name, None)


def _check_page(layout: BlobLayout, blob: Blob) -> None:
    if blob.payload.layout != layout:
        raise BlobError("its tensors differ from pages of this model")


def _check_tail(template: Cache, length: int, blob: Blob) -> None:
    try:
        check_tail_state(template, length, Snapshot(blob.payload.fields, blob.numbers))
    except (CacheError, ValueError) as error:
        raise BlobError(f"it does not fit this model: {error}") from error


def _check_same(blob: Blob, stored: Blob) -> None:
    """Raise unless a stored blob has the same layout, tokens and numbers as a new one."""
    if stored.payload.layout != blob.payload.layout:
        raise BlobError("its tensors differ from those that were written")
    stored_values = (stored.parent_page, stored.tokens, dict(stored.numbers))
    if stored_values != (blob.parent_page, blob.tokens, dict(blob.numbers)):
        raise BlobError("its tokens or its length differ from those that were written")


def _name_pages(root: bytes, tokens: Sequence[int]) -> list[str]:
    """Return the names of the root and of all whole pages in a store."""
    return [f"{root.hex()[:16]}/{key.hex()}" for key in make_page_keys(root, tokens)]


def _name_tail_state(tokens: Sequence[int]) -> str:
    """Return the part name of the tail state of a prefix of these tokens."""
    tail = tokens[len(tokens) // PAGE_TOKENS * PAGE_TOKENS :]
    tail_digest = digest(*(token.to_bytes(8, "little") for token in tail))
    return f"a-{tail_digest.hex()[:16]}-{len(tokens)}"


def _parse_tail_length(part: str) -> int:
    """Return the length in the name of a tail state; -1 for other parts."""
    prefix, _, length = part.rpartition("-")
    return int(length) if prefix.startswith("a-") and length.isdecimal() else -1
