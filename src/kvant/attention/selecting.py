"""Which sealed pages a query reads: the best by the bounds of their keys, and some always.

No key of a page can score more than the largest and the least value of each channel allow: each
channel of a query takes the one that suits its sign. Query heads that share a key head read the
same pages: those where these bounds are the largest in sum.

A query chooses among pages all of whose rows it sees. The newest sealed ones are always read, and
so are pages that it sees in part.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvant.attention.writing import SEAL_AT_ONCE, open_pages
from kvant.contracts import Mask, Request, Stored, Summary, View
from kvant.extent import BEGINS, FIRST_SEALED, STOP_SEALED, Ints

NEWEST = 256  # sealed rows that are always read: what a text is about to say depends on most
LOW, FIRST, STOP, HIGH, COUNT = range(5)  # of `ranges`


def ranges(view: View, rule: Mask, queries: int) -> Ints | None:
    """Of each query [B, T, 5]: pages [low, high) are seen, `count` of [first, stop) to be chosen.

    None where all are read.
    """
    assert view.selecting is not None
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
    row = np.maximum(np.maximum(begins, first_sealed * page), np.minimum(kind.sinks, at + 1))
    if rule.window is not None and not rule.sinks > kind.sinks:
        row = np.maximum(row, at - rule.window + 1)
    if rule.chunk is not None:
        row = np.maximum(row, at // rule.chunk * rule.chunk)
    high = np.minimum(kind.paging.all_due(np.maximum(at + 1, 0)), stop_sealed)
    low = np.minimum(row // page, high)
    stop = np.maximum(high - -(-NEWEST // page), low)
    first = np.minimum(-(-row // page), stop)
    count = view.selecting.selection.count(stop - first)
    return np.stack([low, first, stop, high, count], -1)


def widest(found: Ints) -> int:
    """Pages that a query reads, at most."""
    read = found[..., HIGH] - found[..., LOW] - (found[..., STOP] - found[..., FIRST])
    return int((read + found[..., COUNT]).max(initial=0))


def rule_of(request: Request, view: View) -> Mask:
    """The rule by which pages are chosen: where a tensor says who sees what, that of the view."""
    return request.mask if isinstance(request.mask, Mask) else view.mask


def choose(request: Request, view: View) -> Tensor | None:
    """What `Request.chosen` says, by plain tensor operations."""
    if view.selecting is None:
        return None
    found = ranges(view, rule_of(request, view), request.q.shape[2])
    if found is None:
        return None
    summary = summarized(view)
    batch, all_heads, queries, dim = request.q.shape
    heads = view.keys.heads
    q = request.q.float().view(batch, heads, all_heads // heads, queries, dim)
    split = torch.cat([q.clamp(min=0), q.clamp(max=0)], -1).sum(2)  # [B, H, T, 2 D]
    numbers = torch.from_numpy(found).to(q.device)
    width, stop = widest(found), int(found[..., HIGH].max())
    page = torch.arange(stop, device=q.device)
    out = []
    for b in range(batch):
        slots = torch.from_numpy(view.extent.sealed[b, :stop]).to(q.device)
        bounds = summary.bounds[slots].float().flatten(2)  # [pages, H, 2 D]
        scores = torch.einsum("htd,phd->htp", split[b], bounds)
        low, first, last, high, count = (numbers[b, :, i, None] for i in range(5))  # [T, 1]
        among = (page >= first) & (page < last)
        order = scores.masked_fill(~among, float("-inf")).argsort(stable=True, descending=True)
        best = torch.zeros_like(scores, dtype=torch.bool)
        best.scatter_(-1, order, (page < count).expand_as(order))
        read = (best & among) | ((page >= low) & (page < high) & ~among)
        chosen = torch.where(read, page, stop).sort(-1).values[..., :width]
        out.append(torch.where(chosen < stop, chosen, -1))
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
    if ("summarized", id(summary)) not in view.extent.shared:
        slots = np.unique(view.extent.sealed_slots())
        lacking = slots[summary.of[slots] != selecting.takes[slots]]
        for first in range(0, len(lacking), SEAL_AT_ONCE):
            some = lacking[first : first + SEAL_AT_ONCE]
            summary.bounds[torch.from_numpy(some)] = bounds_of(stored, some)
            summary.of[some] = selecting.takes[some]
        view.extent.shared["summarized", id(summary)] = summary  # kept: so no other has its id
    return summary


def bounds_of(stored: Stored, slots: Ints) -> Tensor:
    """The largest and the least value of sealed pages of keys, [n, H, 2, D]."""
    rows = open_pages(stored, "keys", torch.from_numpy(slots))
    return torch.stack([rows.amax(2), rows.amin(2)], 2).to(stored.open.dtype)
