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

from kvant.attention.writing import SEAL_AT_ONCE, open_pages
from kvant.contracts import Mask, Request, Stored, Summary, View
from kvant.extent import BEGINS, FIRST_SEALED, STOP_SEALED, Ints

WIDER = 0.5  # of its range, to either side: a page whose keys differ much has one that stands out
AT_ONCE = 256  # queries: bounds the scratch
NEWEST = 256  # sealed rows that are always read: what a text is about to say depends on most
LOW, FIRST, STOP, HIGH, COUNT = range(5)  # of `ranges`


def ranges(view: View, rule: Mask, queries: int) -> Ints | None:
    """Of each query [B, T, 5]: pages [low, high) are seen, `count` of [first, stop) to be chosen.

    None where all are read.
    """
    assert view.selecting is not None
    if rule.window is not None and rule.sinks > view.extent.kind.sinks:
        return None  # sinks that somebody asks for lie among the others
    key = ("ranges", view.selecting.selection, rule, queries)
    if key not in view.extent.memo:
        found = _ranges(view, rule, queries)
        some = bool((found[..., COUNT] < found[..., STOP] - found[..., FIRST]).any())
        view.extent.memo[key] = found if some else None
    told: Ints | None = view.extent.memo[key]
    return told


def _ranges(view: View, rule: Mask, queries: int) -> Ints:
    assert view.selecting is not None
    extent, kind, page = view.extent, view.extent.kind, view.extent.kind.page
    at = extent.lengths[:, None] - queries + np.arange(queries)  # positions
    begins, first_sealed, stop_sealed = (
        extent.numbers[:, which, None] for which in (BEGINS, FIRST_SEALED, STOP_SEALED)
    )
    row = np.maximum(np.maximum(begins, first_sealed * page), kind.sinks)
    if rule.window is not None:
        row = np.maximum(row, at - rule.window + 1)
    if rule.chunk is not None:
        row = np.maximum(row, at // rule.chunk * rule.chunk)
    high = np.minimum(kind.paging.all_due(np.maximum(at + 1, 0)), stop_sealed)
    low = np.minimum(row // page, high)
    stop = np.maximum(high - -(-NEWEST // page), low)
    # Of a sequence whose first row is still seen, the page that holds it is no page to choose.
    first = np.where(low == begins // page, low + 1, -(-row // page))
    first = np.minimum(first, stop)
    count = view.selecting.selection.count(stop - first)
    return np.stack([low, first, stop, high, count], -1)


def widest(found: Ints) -> int:
    """Pages that a query reads, at most."""
    read = found[..., HIGH] - found[..., LOW] - (found[..., STOP] - found[..., FIRST])
    return int((read + found[..., COUNT]).max(initial=0))


def choose(request: Request, view: View) -> Tensor | None:
    """What `Request.chosen` says, by plain tensor operations."""
    assert isinstance(request.mask, Mask)
    count = request.q.shape[2]
    found = ranges(view, request.mask, count)
    if found is None:
        return None
    bounds, width = summarized(view).bounds, widest(found)
    parts = [
        _chosen(request.q[:, :, t : t + AT_ONCE], found[:, t : t + AT_ONCE], view, bounds, width)
        for t in range(0, count, AT_ONCE)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _chosen(queries: Tensor, found: Ints, view: View, bounds: Tensor, width: int) -> Tensor:
    batch, all_heads, count, dim = queries.shape
    heads = view.keys.heads
    q = queries.float().view(batch, heads, all_heads // heads, count, dim)
    split = torch.cat([q.clamp(min=0), q.clamp(max=0)], -1).sum(2)  # [B, H, T, 2 D]
    numbers, high_most = torch.from_numpy(found).to(q.device), int(found[..., HIGH].max())
    page, out = torch.arange(high_most, device=q.device), []
    for b in range(batch):
        slots = torch.from_numpy(view.extent.sealed[b, :high_most]).to(q.device)
        known = bounds[slots].float().flatten(2)  # [pages, H, 2 D]
        scores = torch.einsum("htd,phd->htp", split[b], known)
        low, first, stop, high, chosen = (numbers[b, :, i, None] for i in range(5))  # [T, 1]
        among = (page >= first) & (page < stop)
        order = scores.masked_fill(~among, float("-inf")).argsort(stable=True, descending=True)
        best = torch.zeros_like(scores, dtype=torch.bool)
        best.scatter_(-1, order, (page < chosen).expand_as(order))
        read = (best & among) | ((page >= low) & (page < high) & ~among)
        some = torch.where(read, page, high_most).sort(-1).values[..., :width]
        out.append(torch.where(some < high_most, some, -1))
    return torch.stack(out)


def reads(chosen: Tensor, pages: int) -> Tensor:
    """Which of so many pages are chosen: [..., n] numbers -> [..., pages] booleans."""
    none = torch.zeros(*chosen.shape[:-1], pages + 1, dtype=torch.bool, device=chosen.device)
    return none.scatter(-1, chosen.where(chosen >= 0, pages), True)[..., :pages]


def summarized(view: View) -> Summary:
    """The summary of the keys, with all pages in it that a view has."""
    stored, selecting = view.keys, view.selecting
    summary = stored.summary
    assert summary is not None
    assert selecting is not None
    # The tables may be those of an extent that has other pages.
    pages = view.extent.numbers[:, [FIRST_SEALED, STOP_SEALED]].tobytes()
    key = "summarized", id(summary), pages
    if key not in view.extent.shared:
        slots = np.unique(view.extent.sealed_slots())
        lacking = slots[summary.of[slots] != selecting.takes[slots]]
        for first in range(0, len(lacking), SEAL_AT_ONCE):
            some = lacking[first : first + SEAL_AT_ONCE]
            summary.bounds[torch.from_numpy(some)] = bounds_of(stored, some)
            summary.of[some] = selecting.takes[some]
        view.extent.shared[key] = summary  # kept: so no other has its id
    return summary


def bounds_of(stored: Stored, slots: Ints) -> Tensor:
    """What is known of sealed pages of keys, [n, H, 2, D]: their ranges, widened."""
    rows = open_pages(stored, "keys", torch.from_numpy(slots))
    largest, least = rows.amax(2), rows.amin(2)
    wider, most = (largest - least) * WIDER, torch.finfo(stored.open.dtype).max
    bounds = torch.stack([largest + wider, least - wider], 2).clamp(-most, most)
    return bounds.to(stored.open.dtype)
