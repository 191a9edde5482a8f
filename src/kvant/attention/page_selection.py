"""Select the sealed pages that a query reads, by upper bounds on the scores of their keys.

A page's summary is the minimum and maximum of its keys in each channel. They bound the score of
any key in the page. Bounds are widened, since a page of diverse keys often has an outstanding one.
Query heads that share a key head read the same pages: those with the largest sum of bounds.

Candidates are pages whose rows the query sees completely. Three kinds of pages are always read and
do not count as selected: the newest sealed pages, partly visible pages, and the first page of a
sequence, because many models attend to the first tokens (attention sinks).

    pages   low       first                         stop           high
            |  always  |  candidates, `count` read   |    always    |
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvant.attention.write_rows import MAX_PAGES_PER_SEAL, decode_pages
from kvant.contracts import AttentionRequest, Mask, PagedTensors, PageSelection, PageSummary, View
from kvant.lazy import Memo
from kvant.page_table import FIRST_SEALED, FIRST_VISIBLE, STOP_SEALED, Ints

BOUNDS_MARGIN = 0.5  # widening of a page's bounds on either side, as a fraction of their range
MAX_QUERIES_AT_ONCE = 256  # bounds the scratch
NUM_ALWAYS_READ_ROWS = 256  # newest sealed rows: the next tokens depend on them most
LOW_PAGE, FIRST_CANDIDATE, STOP_CANDIDATE, HIGH_PAGE, NUM_SELECTED = range(5)  # of page_ranges
# The summaries whose bounds are up to date, by their id and the sealed pages of the view.
FRESH_SUMMARIES: Memo[dict[tuple[int, bytes], PageSummary]] = Memo("fresh summaries")


class PageRanges(NamedTuple):
    """The sealed pages of each query: [low, high) are visible, [first, stop) are candidates."""

    ranges: Ints  # [B, T, 5]: low, first, stop, high, number of candidates to select
    max_pages: int  # the largest number of pages that a query reads


PAGE_RANGES: Memo[dict[tuple[PageSelection, Mask, int], PageRanges | None]] = Memo("page ranges")


def compute_page_ranges(view: View, rule: Mask, num_queries: int) -> PageRanges | None:
    """Return the page ranges of each query; None if every visible page is read."""
    assert view.selection is not None
    if rule.window is not None and rule.sinks > view.page_table.layer_group.sinks:
        return None  # sinks of the rule are in sealed pages
    known = view.page_table.derived.setdefault(PAGE_RANGES, {})
    key = view.selection.rule, rule, num_queries
    if key not in known:
        ranges = _compute_page_ranges(view, rule, num_queries)
        num_skipped = (
            ranges[..., STOP_CANDIDATE] - ranges[..., FIRST_CANDIDATE] - ranges[..., NUM_SELECTED]
        )
        num_read = ranges[..., HIGH_PAGE] - ranges[..., LOW_PAGE] - num_skipped
        selects = bool((num_skipped > 0).any())
        known[key] = PageRanges(ranges, int(num_read.max(initial=0))) if selects else None
    return known[key]


def _compute_page_ranges(view: View, rule: Mask, num_queries: int) -> Ints:
    assert view.selection is not None
    page_table, group = view.page_table, view.page_table.layer_group
    page = group.page
    positions = page_table.lengths[:, None] - num_queries + np.arange(num_queries)
    first_visible, first_sealed, stop_sealed = (
        page_table.numbers[:, column, None] for column in (FIRST_VISIBLE, FIRST_SEALED, STOP_SEALED)
    )
    lowest_row = np.maximum(np.maximum(first_visible, first_sealed * page), group.sinks)
    if rule.window is not None:
        lowest_row = np.maximum(lowest_row, positions - rule.window + 1)
    if rule.chunk is not None:
        lowest_row = np.maximum(lowest_row, positions // rule.chunk * rule.chunk)
    num_due = group.paging.count_due_pages_each(np.maximum(positions + 1, 0))
    high = np.minimum(num_due, stop_sealed)
    low = np.minimum(lowest_row // page, high)
    stop = np.maximum(high - -(-NUM_ALWAYS_READ_ROWS // page), low)
    # The page with the first visible row of the sequence is always read, so it is no candidate.
    first = np.where(low == first_visible // page, low + 1, -(-lowest_row // page))
    first = np.minimum(first, stop)
    count = view.selection.rule.count_selected(stop - first)
    return np.stack([low, first, stop, high, count], -1)


def select_pages(request: AttentionRequest, view: View) -> Tensor | None:
    """Return `AttentionRequest.selected_pages`, computed with plain tensor operations."""
    assert isinstance(request.mask, Mask)
    count = request.q.shape[2]
    page_ranges = compute_page_ranges(view, request.mask, count)
    if page_ranges is None:
        return None
    bounds = refresh_summary(view).bounds
    parts = [
        _select_pages(
            request.q[:, :, t : t + MAX_QUERIES_AT_ONCE],
            page_ranges.ranges[:, t : t + MAX_QUERIES_AT_ONCE],
            view,
            bounds,
            page_ranges.max_pages,
        )
        for t in range(0, count, MAX_QUERIES_AT_ONCE)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _select_pages(
    queries: Tensor, page_ranges: Ints, view: View, bounds: Tensor, max_pages: int
) -> Tensor:
    batch, all_heads, count, dim = queries.shape
    heads = view.keys.heads
    q = queries.float().view(batch, heads, all_heads // heads, count, dim)
    split = torch.cat([q.clamp(min=0), q.clamp(max=0)], -1).sum(2)  # [B, H, T, 2 D]
    ranges = torch.from_numpy(page_ranges).to(q.device)
    num_pages = int(page_ranges[..., HIGH_PAGE].max())
    page, selected = torch.arange(num_pages, device=q.device), []
    for b in range(batch):
        slots = torch.from_numpy(view.page_table.sealed_table[b, :num_pages]).to(q.device)
        page_bounds = bounds[slots].float().flatten(2)  # [pages, H, 2 D]
        scores = torch.einsum("htd,phd->htp", split[b], page_bounds)
        low, first, stop, high, num_best = (ranges[b, :, i, None] for i in range(5))  # [T, 1]
        is_candidate = (page >= first) & (page < stop)
        candidate_scores = scores.masked_fill(~is_candidate, float("-inf"))
        order = candidate_scores.argsort(stable=True, descending=True)
        is_best = torch.zeros_like(scores, dtype=torch.bool)
        is_best.scatter_(-1, order, (page < num_best).expand_as(order))
        always_read = (page >= low) & (page < high) & ~is_candidate
        read = (is_best & is_candidate) | always_read
        numbers = torch.where(read, page, num_pages).sort(-1).values[..., :max_pages]
        selected.append(torch.where(numbers < num_pages, numbers, -1))
    return torch.stack(selected)


def make_page_mask(selected_pages: Tensor, num_pages: int) -> Tensor:
    """Convert selected page numbers [..., n] to booleans [..., num_pages]."""
    mask = torch.zeros(
        *selected_pages.shape[:-1], num_pages + 1, dtype=torch.bool, device=selected_pages.device
    )
    index = selected_pages.where(selected_pages >= 0, num_pages)  # -1 goes to an extra column
    return mask.scatter(-1, index, True)[..., :num_pages]


def refresh_summary(view: View) -> PageSummary:
    """Return the key summary, with the bounds of every sealed page of the view up to date."""
    summary, selection = view.keys.summary, view.selection
    assert summary is not None
    assert selection is not None
    # Another page table may share these slot tables and use other pages of them.
    pages = view.page_table.numbers[:, FIRST_SEALED : STOP_SEALED + 1].tobytes()
    fresh = view.page_table.derived_from_tables.setdefault(FRESH_SUMMARIES, {})
    if (key := (id(summary), pages)) not in fresh:
        slots = np.unique(view.page_table.list_sealed_slots())
        stale = slots[summary.slot_versions[slots] != selection.slot_versions[slots]]
        for first in range(0, len(stale), MAX_PAGES_PER_SEAL):
            part = stale[first : first + MAX_PAGES_PER_SEAL]
            summary.bounds[torch.from_numpy(part)] = compute_key_bounds(view.keys, part)
            summary.slot_versions[part] = selection.slot_versions[part]
        fresh[key] = summary  # a reference, so its id stays unique
    return summary


def compute_key_bounds(tensors: PagedTensors, slots: Ints) -> Tensor:
    """Return the widened bounds of the keys in sealed pages, [n, H, 2, D]: upper, then lower."""
    rows = decode_pages(tensors, "keys", torch.from_numpy(slots))
    upper, lower = rows.amax(2), rows.amin(2)
    margin, limit = (upper - lower) * BOUNDS_MARGIN, torch.finfo(tensors.open.dtype).max
    bounds = torch.stack([upper + margin, lower - margin], 2).clamp(-limit, limit)
    return bounds.to(tensors.open.dtype)
