"""Write prefixes to stores in the background, find them there, and restore them.

A prefix is stored as blobs. A blob is found by the name of a token page (64 tokens, with a key of
`keys.py`) and a part name. A KV page has the rows of a layer group for one or more token pages. It
is stored under the name of the last of them:

    page name   <16 hex digits of the tree key>/<page key>
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
from kvant.cache.layout import iterate_leaves
from kvant.cache.transfer import (
    PageId,
    PageSet,
    RestoreBuffer,
    check_tail_state,
    get_page_shapes,
    list_page_sizes,
    make_empty_tail_state,
)
from kvant.contracts import Snapshot
from kvant.errors import BlobError, CacheError, SnapshotMismatch
from kvant.hf import TransformersCache
from kvant.prefixes.keys import PAGE_TOKENS, digest, make_page_key
from kvant.prefixes.restore import LookupDeadline, PageReader, RestoreTimes
from kvant.recipes import CacheSpec, LayerSpec
from kvant.stores import Blob, BlobLayout, BlobPayload, Tiers
from kvant.stores.tiers import Check
from kvant.vision import ImageFeatures

log = logging.getLogger("kvant")

CANCEL_TIMEOUT_S = 1.0  # seconds that cancelling a write waits for a copy in progress
MAX_COPY_BYTES = 8 << 20  # of pages that are copied at a time for a write
MIN_TAIL_DIVISOR = 20  # a tail is written if it has more than 1 / 20 of the prefix's tokens
MAX_KNOWN_PAGES = 1 << 14  # page names in each of three collections: about 400 bytes each


@dataclass(frozen=True)
class CachedPrefix:
    """The tokens and the cache of a prefix."""

    tokens: tuple[int, ...]
    cache: TransformersCache
    num_prefilled: int  # leading tokens that were prefilled; the others were decoded
    features: Mapping[bytes, ImageFeatures] = field(default_factory=dict)  # by digest of an image


@dataclass(frozen=True)
class StoreHit:
    """A prefix that a store seems to have; its blobs are not read yet."""

    tokens: tuple[int, ...]
    page_names: list[str]  # of the tree key, then of each whole token page
    tail_state_part: str | None  # filed under the last page name; None: pages are enough

    @property
    def length(self) -> int:
        return len(self.tokens)


class PendingBlob(NamedTuple):
    """A blob of a prefix that may have to be written."""

    page_id: PageId | None  # None: the tail state
    page_name: str  # of the token page at which it ends
    part: str
    token_range: range
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
            missing = self.prefix_store.list_missing(self.pending)
            for _, blobs in groupby(missing, lambda blob: blob.page_id and blob.page_id[0]):
                run = list(blobs)  # pages of one layer group, or a tail state
                size = max(1, MAX_COPY_BYTES // max(run[0].nbytes, 1))
                for begin in range(0, len(run), size):
                    for blob in self._copy_blobs(run[begin : begin + size]):
                        if self.page_set is None:
                            return
                        self.prefix_store.put(blob)
                        yield len(blob.payload.data)
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Release the pages, after a copy in progress."""
        is_locked = self._copy_lock.acquire(timeout=CANCEL_TIMEOUT_S)
        self.page_set = None
        if is_locked:
            self._copy_lock.release()

    def _copy_blobs(self, batch: Sequence[PendingBlob]) -> list[Blob]:
        """Copy a batch of blobs out of the cache; [] after a cancel."""
        with self._copy_lock:
            return [] if self.page_set is None else self._make_blobs(batch, self.page_set)

    def _make_blobs(self, batch: Sequence[PendingBlob], page_set: PageSet) -> list[Blob]:
        """Make blobs of pages of one layer group, or of a tail state."""
        numbers: Mapping[str, int] = {}
        if batch[0].page_id is None:
            tail_state = page_set.snapshot_tail_state()
            payloads, numbers = [BlobPayload.from_fields(tail_state.tensors)], tail_state.numbers
        else:
            group = batch[0].page_id[0]
            layout = BlobLayout.from_shapes(get_page_shapes(page_set.cache, group))
            data = torch.zeros(len(batch), layout.nbytes, dtype=torch.uint8)
            page_numbers = [blob.page_id[1] for blob in batch if blob.page_id is not None]
            page_set.copy_pages(group, page_numbers, layout.view_fields(data))
            payloads = [BlobPayload(layout, row) for row in data]
        blobs = []
        for pending, payload in zip(batch, payloads, strict=True):
            begin, end = pending.token_range.start, pending.token_range.stop
            blob = Blob(
                page=pending.page_name,
                part=pending.part,
                parent_page=self.page_names[begin // PAGE_TOKENS],
                tokens=self.tokens[begin:end],
                payload=payload,
                numbers=numbers,
                num_prefilled=min(self.num_prefilled, end),
                metadata=self.metadata,
            )
            blobs.append(blob)
        return blobs


class PrefixStore:
    """Prefixes in stores: queued writes, lookups and restores; for any number of threads."""

    def __init__(self, tiers: Tiers, *, shared: bool = False) -> None:
        """`shared` tiers have other users: `close` leaves them open."""
        self.tiers = tiers
        self._shares_tiers = shared
        self._known_parts: dict[str, set[str]] = {}  # recently written or read, by page name
        self._suspect_pages: set[str] = set()  # of prefixes with a missing or corrupt blob
        self._rejected_pages: set[str] = set()  # of restored prefixes on which the model failed
        self._counts: Counter[str] = Counter()
        self.restore_times = RestoreTimes()

    # ---- writing

    def write(
        self,
        tree_key: bytes,
        prefix: CachedPrefix,
        metadata: Mapping[str, str],
        max_length: int | None = None,
    ) -> PrefixWrite:
        """Queue a write of the blobs that the store lacks; the cache must not change.

        With `max_length`, blobs that end after it are not written. If pages suffice, a short tail
        is not written.
        """
        tokens, num_prefilled = prefix.tokens, prefix.num_prefilled
        page_set, names = PageSet(prefix.cache.states), _name_token_pages(tree_key, tokens)
        pending: list[PendingBlob] = []
        for group, numbers in enumerate(page_set.page_ranges):
            size, nbytes = page_set.layer_groups[group].page, page_set.nbytes((group, 0))
            for number in numbers:
                begin, end = number * size, (number + 1) * size
                if max_length is None or end <= max_length:
                    name, part = (
                        names[end // PAGE_TOKENS],
                        _name_kv_page(group, number, end, tokens),
                    )
                    blob = PendingBlob((group, number), name, part, range(begin, end), nbytes)
                    pending.append(blob)
        is_whole = max_length is None or max_length == len(tokens)
        # Tokens after the last full page of the largest size.
        tail_length = len(tokens) % max(list_page_sizes(page_set.cache), default=1)
        has_long_tail = tail_length * MIN_TAIL_DIVISOR > len(tokens)
        if is_whole and (has_long_tail or not pages_suffice(prefix.cache.spec)):
            part, nbytes = _name_tail_state(tokens), page_set.nbytes(None)
            tail_range = range((len(names) - 1) * PAGE_TOKENS, len(tokens))
            pending.append(PendingBlob(None, names[-1], part, tail_range, nbytes))
        pending = [b for b in pending if b.part not in self._known_parts.get(b.page_name, ())]
        write = PrefixWrite(self, page_set, tokens, num_prefilled, names, pending, metadata)
        if not pending or not self.tiers.writer.add(sum(blob.nbytes for blob in pending), write):
            write.cancel()
        return write

    def list_missing(self, pending: Sequence[PendingBlob]) -> list[PendingBlob]:
        """Return the blobs that the stores lack, or that are at suspect pages."""
        names = list(dict.fromkeys(blob.page_name for blob in pending))
        stored_parts = dict(zip(names, self.tiers.has(names), strict=True))
        missing = []
        for blob in pending:
            name = blob.page_name
            if blob.part in stored_parts[name] and name not in self._suspect_pages:
                self._record_part(name, blob.part)
            else:
                missing.append(blob)
        return missing

    def put(self, blob: Blob) -> None:
        """Write a blob now; at a suspect page, only if no valid blob of these tokens is stored.

        At a rejected page, the stored blob is dropped first.
        """
        stored = None
        if blob.page in self._rejected_pages:
            self.tiers.drop(blob.page, blob.part)
        elif blob.page in self._suspect_pages:
            stored = self.tiers.get(blob.page, blob.part, partial(_check_same, blob))
        if stored is not None or self.tiers.put(blob):
            self._record_part(blob.page, blob.part)

    def reject(self, tree_key: bytes, tokens: Sequence[int]) -> None:
        """Ignore stored blobs of these tokens until this process has written them again."""
        names = _name_token_pages(tree_key, tokens)
        if len(self._rejected_pages) >= MAX_KNOWN_PAGES:
            self._rejected_pages.clear()
        self._mark_suspect(names)
        self._rejected_pages.update(names)
        self._counts["refused"] += 1

    # ---- reading

    def find_hits(
        self, tree_key: bytes, tokens: Sequence[int], cache: TransformersCache, num_cached: int
    ) -> Iterator[StoreHit]:
        """Yield stored prefixes of `tokens` longer than `num_cached`, longest first.

        `cache` has the spec of the model; it may be empty.
        """
        names, sizes = _name_token_pages(tree_key, tokens), list_page_sizes(cache.states)
        suffice = pages_suffice(cache.spec)
        parts_by_page = []
        for name, parts in zip(names, self.tiers.has(names), strict=True):
            known = self._known_parts.get(name, set())
            known &= parts  # in place: forget the parts that the stores dropped
            parts_by_page.append(parts & known if name in self._rejected_pages else parts)
        for num_pages in range(len(names) - 1, num_cached // PAGE_TOKENS - 1, -1):
            parts, length = parts_by_page[num_pages], num_pages * PAGE_TOKENS
            max_end = min(len(tokens), length + PAGE_TOKENS - 1)
            for end in sorted({_parse_prefix_length(part) for part in parts}, reverse=True):
                if length <= end <= max_end and end > num_cached:
                    tail_part = _name_tail_state(tokens[:end])
                    if tail_part in parts:
                        yield StoreHit(tuple(tokens[:end]), names[: num_pages + 1], tail_part)
            if (
                suffice
                and num_cached < length < len(tokens)  # leaves a token to prefill
                and not any(length % size for size in sizes)
                and all(
                    _name_kv_page(g, length // size - 1, length, tokens) in parts
                    for g, size in enumerate(sizes)
                )
            ):
                yield StoreHit(tuple(tokens[:length]), names[: num_pages + 1], None)

    def restore(
        self,
        hit: StoreHit,
        base_cache: TransformersCache,
        device: torch.device,
        deadline: LookupDeadline,
    ) -> CachedPrefix | None:
        """Restore a hit into the pools of `base_cache`; None if nothing of it can be used.

        A hit without a tail state is shortened to the pages that were read before the deadline.

        `base_cache` is of the same model and spec; it is empty or holds the first tokens of the
        hit. A blob's shapes are compared with those of `base_cache` before any tensor is used.
        """
        begin, seconds_left = time.perf_counter(), deadline.compute_seconds_left()
        try:
            restored = self._restore(hit, base_cache, device, deadline)
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
        if restored is None and elapsed >= seconds_left:
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
        """Wait `seconds` at most for queued writes; stop early if a store does not answer."""
        if self._shares_tiers:
            self.tiers.flush(seconds)
        else:
            self.tiers.close(seconds)

    # ---- internals

    def _restore(
        self,
        hit: StoreHit,
        base_cache: TransformersCache,
        device: torch.device,
        deadline: LookupDeadline,
    ) -> CachedPrefix | None:
        if not base_cache.has_shapes:
            raise ValueError("the shapes of the model are unknown: prefill a token first")
        template, sizes = base_cache.states, list_page_sizes(base_cache.states)
        shapes = {group: get_page_shapes(template, group) for group in range(len(sizes))}
        layouts = {group: BlobLayout.from_shapes(fields) for group, fields in shapes.items()}
        if hit.tail_state_part is None:
            tail_state = make_empty_tail_state(template, hit.length, shapes)
            num_prefilled = hit.length
        else:
            tail_range = range((len(hit.page_names) - 1) * PAGE_TOKENS, hit.length)
            check = partial(_check_tail, template, hit.length)
            tail = self._get_blob(hit, tail_range, hit.tail_state_part, check)
            if tail is None:
                return None
            tail_state = Snapshot(tail.payload.fields, tail.numbers)
            num_prefilled = tail.num_prefilled
        tensors = {name: tensor.to(device) for name, tensor in tail_state.tensors.items()}
        tail_state = Snapshot(tensors, tail_state.numbers)

        def get_page(page: PageId) -> Blob | None:
            group, number = page
            token_range = range(number * sizes[group], (number + 1) * sizes[group])
            check = partial(_check_page, layouts[group])
            part = _name_kv_page(group, number, token_range.stop, hit.tokens)
            return self._get_blob(hit, token_range, part, check)

        buffer = deadline.allocate(lambda: RestoreBuffer(template, hit.length, tail_state))
        if buffer is None:
            return None
        with buffer:
            reader = PageReader(buffer, hit.length, sizes, layouts, get_page, device)
            progress = reader.read_all(deadline)
            self._counts["late"] += progress.is_late
            length = progress.length
            if length < hit.length:  # round down to a length at which pages of all groups end
                can_be_shorter = hit.tail_state_part is None
                length = length // lcm(*sizes) * lcm(*sizes) if can_be_shorter else 0
            if not length:
                return None
            cache = base_cache.wrap_states(buffer.finish(length))
        num_prefilled = min(num_prefilled, progress.num_prefilled, length)
        return CachedPrefix(hit.tokens[:length], cache, num_prefilled)

    def _get_blob(self, hit: StoreHit, token_range: range, part: str, check: Check) -> Blob | None:
        """Read and check a blob of a hit; if it fails, mark all pages of the hit suspect."""

        def check_blob(blob: Blob) -> None:
            if blob.tokens != hit.tokens[token_range.start : token_range.stop]:
                raise BlobError("it has other tokens")
            check(blob)

        name = hit.page_names[token_range.stop // PAGE_TOKENS]
        blob = self.tiers.get(name, part, check_blob)
        if blob is None:
            self._mark_suspect(hit.page_names)
        else:
            self._record_part(name, part)
        return blob

    def _record_part(self, page_name: str, part: str) -> None:
        """Note that the stores have a blob."""
        if len(self._known_parts) >= MAX_KNOWN_PAGES:
            self._known_parts.clear()
        self._known_parts.setdefault(page_name, set()).add(part)

    def _mark_suspect(self, names: Sequence[str]) -> None:
        """Make later writes compare the stored blobs of these pages instead of trusting them."""
        if len(self._suspect_pages) >= MAX_KNOWN_PAGES:
            self._suspect_pages.clear()
        self._suspect_pages.update(names)
        for name in names:
            self._known_parts.pop(name, None)


def pages_suffice(spec: CacheSpec) -> bool:
    """Return whether full pages are enough to resume a prefix.

    They are not if a layer has a window or a recurrent state, keeps its last rows dense (option
    `tail`), keeps short sequences dense (`dense_until`), or seals (quantizes) all pages but those
    of the first rows (sinks).
    """
    return all(
        isinstance(recipe, LayerSpec)
        and not (recipe.retention.window or recipe.paging.tail or recipe.dense_until)
        and not (recipe.seals and recipe.retention.sinks)
        for _, recipe in iterate_leaves(spec)
    )


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


def _name_token_pages(tree_key: bytes, tokens: Sequence[int]) -> list[str]:
    """Return the store names of the tree key and of each whole token page."""
    keys = [tree_key]
    for begin in range(0, len(tokens) // PAGE_TOKENS * PAGE_TOKENS, PAGE_TOKENS):
        keys.append(make_page_key(keys[-1], tokens[begin : begin + PAGE_TOKENS]))
    return [f"{tree_key.hex()[:16]}/{key.hex()}" for key in keys]


def _name_kv_page(group: int, number: int, end: int, tokens: Sequence[int]) -> str:
    """Return the part name of a KV page of a layer group, which ends before token `end`.

    If it does not end with a token page, tokens that are in no page name are in the part name.
    """
    part = f"k{group}-{number}"
    return part if end % PAGE_TOKENS == 0 else f"{part}-{_digest_last_tokens(tokens, end)}"


def _name_tail_state(tokens: Sequence[int]) -> str:
    """Return the part name of the tail state of a prefix of these tokens."""
    return f"a-{_digest_last_tokens(tokens, len(tokens))}-{len(tokens)}"


def _digest_last_tokens(tokens: Sequence[int], end: int) -> str:
    """Return a digest of the tokens before `end` that follow the last whole token page."""
    last_tokens = tokens[end // PAGE_TOKENS * PAGE_TOKENS : end]
    return digest(*(token.to_bytes(8, "little") for token in last_tokens)).hex()[:16]


def _parse_prefix_length(part: str) -> int:
    """Return the prefix length in the name of a tail state; -1 for other parts."""
    start, _, length = part.rpartition("-")
    return int(length) if start.startswith("a-") and length.isdecimal() else -1
