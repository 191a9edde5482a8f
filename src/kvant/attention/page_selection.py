"""Which sealed pages a query reads: the best by the bounds of their keys, and some always.

A page is known by the ranges of its keys, channel by channel: what a key in it can score with a
query is at most what the range of each channel allows. Ranges are widened, as pages whose keys
differ much have one that stands out. Query heads that share a key head read the same pages: those
where these bounds are the largest in sum.

A query chooses among pages all of whose rows it sees. The newest sealed ones are always read, and
so are the first page of a sequence, since many models attend to its first tokens whatever they say
(attention sinks), and pages that a query sees in part. What a selection counts comes on top.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvant.attention.write_rows import MAX_PAGES_PER_SEAL, decode_pages
from kvant.contracts import AttentionRequest, Mask, PagedTensors, PageSummary, View
from kvant.page_table import FIRST_SEALED, FIRST_VISIBLE, STOP_SEALED, Ints

BOUNDS_MARGIN = (
    0.5  # of its range, to either side: a page whose keys differ much has one that stands out
)
MAX_QUERIES_AT_ONCE = 256  # queries: bounds the scratch
NUM_ALWAYS_READ_ROWS = (
    256  # sealed rows that are always read: what a text is about to say depends on most
)
LOW_PAGE, FIRST_CANDIDATE, STOP_CANDIDATE, HIGH_PAGE, NUM_SELECTED = range(5)  # of `ranges`


def compute_page_ranges(view: View, rule: Mask, num_queries: int) -> Ints | None:
    """Of each query [B, T, 5]: pages [low, high) are seen, `count` of [first, stop) to be chosen.

    None where all are read.
    """
    assert view.selection is not None
    if rule.window is not None and rule.sinks > view.page_table.layer_group.sinks:
        return None  # sinks that somebody asks for lie among the others
    key = ("ranges", view.selection.rule, rule, num_queries)
    if key not in view.page_table.derived:
        found = _compute_page_ranges(view, rule, num_queries)
        some = bool(
            (
                found[..., NUM_SELECTED] < found[..., STOP_CANDIDATE] - found[..., FIRST_CANDIDATE]
            ).any()
        )
        view.page_table.derived[key] = found if some else None
    told: Ints | None = view.page_table.derived[key]
    return told


def _compute_page_ranges(view: View, rule: Mask, num_queries: int) -> Ints:
    assert view.selection is not None
    extent, kind, page = (
        view.page_table,
        view.page_table.layer_group,
        view.page_table.layer_group.page,
    )
    at = extent.lengths[:, None] - num_queries + np.arange(num_queries)  # positions
    begins, first_sealed, stop_sealed = (
        extent.numbers[:, which, None] for which in (FIRST_VISIBLE, FIRST_SEALED, STOP_SEALED)
    )
    row = np.maximum(np.maximum(begins, first_sealed * page), kind.sinks)
    if rule.window is not None:
        row = np.maximum(row, at - rule.window + 1)
    if rule.chunk is not None:
        row = np.maximum(row, at // rule.chunk * rule.chunk)
    high = np.minimum(kind.paging.count_due_pages_each(np.maximum(at + 1, 0)), stop_sealed)
    low = np.minimum(row // page, high)
    stop = np.maximum(high - -(-NUM_ALWAYS_READ_ROWS // page), low)
    # Of a sequence whose first row is still seen, the page that holds it is no page to choose.
    first = np.where(low == begins // page, low + 1, -(-row // page))
    first = np.minimum(first, stop)
    count = view.selection.rule.count_selected(stop - first)
    return np.stack([low, first, stop, high, count], -1)


def count_max_pages(page_ranges: Ints) -> int:
    """Pages that a query reads, at most."""
    read = (
        page_ranges[..., HIGH_PAGE]
        - page_ranges[..., LOW_PAGE]
        - (page_ranges[..., STOP_CANDIDATE] - page_ranges[..., FIRST_CANDIDATE])
    )
    return int((read + page_ranges[..., NUM_SELECTED]).max(initial=0))


def select_pages(request: AttentionRequest, view: View) -> Tensor | None:
    """What `Request.chosen` says, by plain tensor operations."""
    assert isinstance(request.mask, Mask)
    count = request.q.shape[2]
    found = compute_page_ranges(view, request.mask, count)
    if found is None:
        return None
    bounds, width = refresh_summary(view).bounds, count_max_pages(found)
    parts = [
        _select_pages(
            request.q[:, :, t : t + MAX_QUERIES_AT_ONCE],
            found[:, t : t + MAX_QUERIES_AT_ONCE],
            view,
            bounds,
            width,
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
    numbers, high_most = (
        torch.from_numpy(page_ranges).to(q.device),
        int(page_ranges[..., HIGH_PAGE].max()),
    )
    page, out = torch.arange(high_most, device=q.device), []
    for b in range(batch):
        slots = torch.from_numpy(view.page_table.sealed_table[b, :high_most]).to(q.device)
        known = bounds[slots].float().flatten(2)  # [pages, H, 2 D]
        scores = torch.einsum("htd,phd->htp", split[b], known)
        low, first, stop, high, chosen = (numbers[b, :, i, None] for i in range(5))  # [T, 1]
        among = (page >= first) & (page < stop)
        order = scores.masked_fill(~among, float("-inf")).argsort(stable=True, descending=True)
        best = torch.zeros_like(scores, dtype=torch.bool)
        best.scatter_(-1, order, (page < chosen).expand_as(order))
        read = (best & among) | ((page >= low) & (page < high) & ~among)
        some = torch.where(read, page, high_most).sort(-1).values[..., :max_pages]
        out.append(torch.where(some < high_most, some, -1))
    return torch.stack(out)


def make_page_mask(selected_pages: Tensor, num_pages: int) -> Tensor:
    """Which of so many pages are chosen: [..., n] numbers -> [..., pages] booleans."""
    none = torch.zeros(
        *selected_pages.shape[:-1], num_pages + 1, dtype=torch.bool, device=selected_pages.device
    )
    return none.scatter(-1, selected_pages.where(selected_pages >= 0, num_pages), True)[
        ..., :num_pages
    ]


def refresh_summary(view: View) -> PageSummary:
    """The summary of the keys, with all pages in it that a view has."""
    stored, selecting = view.keys, view.selection
    summary = stored.summary
    assert summary is not None
    assert selecting is not None
    # The tables may be those of an extent that has other pages.
    pages = view.page_table.numbers[:, [FIRST_SEALED, STOP_SEALED]].tobytes()
    key = "summarized", id(summary), pages
    if key not in view.page_table.derived_from_tables:
        slots = np.unique(view.page_table.list_sealed_slots())
        lacking = slots[summary.slot_versions[slots] != selecting.slot_versions[slots]]
        for first in range(0, len(lacking), MAX_PAGES_PER_SEAL):
            some = lacking[first : first + MAX_PAGES_PER_SEAL]
            summary.bounds[torch.from_numpy(some)] = compute_key_bounds(stored, some)
            summary.slot_versions[some] = selecting.slot_versions[some]
        view.page_table.derived_from_tables[key] = summary  # kept: so no other has its id
    return summary


def compute_key_bounds(tensors: PagedTensors, slots: Ints) -> Tensor:
    """What is known of sealed pages of keys, [n, H, 2, D]: their ranges, widened."""
    rows = decode_pages(tensors, "keys", torch.from_numpy(slots))
    largest, least = rows.amax(2), rows.amin(2)
    wider, most = (largest - least) * BOUNDS_MARGIN, torch.finfo(tensors.open.dtype).max
    bounds = torch.stack([largest + wider, least - wider], 2).clamp(-most, most)
    return bounds.to(tensors.open.dtype)
