"""The backend for CPUs: C++ on the stored bytes, behind a plain C interface.

It stores rows and reads raw, affine, codebook and fp8 pages, all queries of a key head in one pass
over its rows: one call a layer for all sequences. It says of everything else why not. Sealed pages
must lie as `Lanes` says.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvant.attention.native import records
from kvant.attention.native.records import CHOOSE, LANES, NO_MEMORY, NO_ROWS, REQUEST, STORE
from kvant.attention.selecting import ranges, summarized, widest
from kvant.contracts import Fields, Mask, Request, Stored, Tiles, View
from kvant.extent import Change
from kvant.native import DTYPES, library, perform, rows_record

MAX_GROUP = 16  # of the kernels
PROCESSOR = torch.device("cpu")
PLAIN = (Tensor, torch.nn.Parameter)  # others may have no memory
KEYS, VALUES = (records.KEY, "keys"), (records.KEY, "values")
NO_SIDE = (*NO_MEMORY, *NO_ROWS)
NO_PAGES = (*NO_MEMORY, 0)


class Native:
    """Stores rows and attends over pages with the compiled kernels."""

    name = "native"

    @property
    def prompts(self) -> bool:
        return library().isa not in ("", "plain")

    def supports(self, pages: View, request: Request | None = None) -> str | None:
        if library().functions is None:
            return library().reason
        if pages.values is pages.keys:
            return "values that lie inside the keys"
        keys, values = records.side(pages.keys, "keys"), records.side(pages.values, "values")
        if (reason := keys.unread or values.unread) is not None:
            return reason
        if pages.own is not None:
            for name, kept in (("keys", keys), ("values", values)):
                x = pages.own[name]
                if type(x) is not Tensor or x.dtype != kept.dtype or x.stride(3) != 1:
                    return f"{name} that came in a {type(x).__name__} of {x.dtype}, or in pieces"
        return None if request is None else _unasked(request, keys.heads)

    def choose(self, request: Request, pages: View) -> Tensor | None:
        q, keys, mask = request.q, pages.keys, request.mask
        assert isinstance(mask, Mask)
        batch, all_heads, queries, dim = q.shape
        found = ranges(pages, mask, queries)
        if found is None:
            return None
        bounds = summarized(pages).bounds
        width, (slot, head, _, _) = widest(found), bounds.stride()
        chosen = torch.empty(
            (batch, keys.heads, queries, width), dtype=torch.int64, device=PROCESSOR
        )
        record = CHOOSE.pack(
            *records.extent(pages.extent),
            *(keys.heads, all_heads // keys.heads, queries, dim),
            *(*rows_record(q), DTYPES[q.dtype]),
            *(bounds.data_ptr(), bounds.nbytes, slot * bounds.itemsize, head * bounds.itemsize),
            *(DTYPES[bounds.dtype], *records.memory(found)),
            *(chosen.data_ptr(), chosen.nbytes, width, torch.get_num_threads()),
        )
        perform("choose", record)
        return chosen

    def attend(self, request: Request, pages: View) -> tuple[Tensor, Tensor | None]:
        keys = pages.keys.memo.get(KEYS) or records.side(pages.keys, "keys")
        values = pages.values.memo.get(VALUES) or records.side(pages.values, "values")
        own, q, mask, logits = pages.own, request.q, request.mask, request.sink_logits
        chosen = request.chosen
        assert isinstance(mask, Mask)
        batch, heads, queries, dim = q.shape
        if values.dim == dim and request.out_dtype is q.dtype and q.is_contiguous():
            out = torch.empty_like(q)  # in half the time
        else:
            shape = batch, heads, queries, values.dim
            out = torch.empty(shape, dtype=request.out_dtype, device=PROCESSOR)
        assert type(out) is Tensor, "rows that are there, in a mode whose tensors are not"
        lse = out.new_empty(out.shape[:3], dtype=torch.float32) if request.lse else None
        if logits is not None:
            logits = logits.float().contiguous()
        came = 0 if own is None else own["keys"].shape[2]
        record = REQUEST.pack(
            *keys.place,
            *values.place,
            *records.extent(pages.extent),
            *(keys.heads, heads // keys.heads, queries),
            *(NO_ROWS if own is None else rows_record(own["keys"])),
            *(NO_ROWS if own is None else rows_record(own["values"])),
            *(came, came if pages.dense else 0),
            *(mask.causal, mask.window or 0, mask.sinks, mask.chunk or 0),
            *(request.scale, request.softcap or 0.0),
            *(NO_MEMORY if logits is None else (logits.data_ptr(), logits.nbytes)),
            *(*rows_record(q), DTYPES[q.dtype], out.data_ptr(), out.nbytes, DTYPES[out.dtype]),
            *(NO_MEMORY if lse is None else (lse.data_ptr(), lse.nbytes)),
            *(NO_PAGES if chosen is None else (chosen.data_ptr(), chosen.nbytes, chosen.shape[3])),
            torch.get_num_threads(),
        )
        perform("attend", record)
        return out, lse

    def store(self, change: Change, rows: Fields, sides: Mapping[str, Stored]) -> bool:
        """Copy, write and seal what a change says of the rows that came; False where it is not.

        Then nothing was written. Pages that are to be opened again are not opened here.
        """
        if library().functions is None or len(change.opens) or torch.compiler.is_compiling():
            return False
        batch, count = len(change.after.numbers), change.count
        heads = page = 0
        places: list[int] = []
        for name, stored in sides.items():
            kept = stored.memo.get((records.KEY, name)) or records.side(stored, name)
            x = rows[name]
            heads, page = kept.heads, kept.page
            if kept.unstored is not None or type(x) is not Tensor or x.dtype != kept.dtype:
                return False
            if x.shape != (batch, heads, count, kept.dim) or x.stride(3) != 1:
                return False
            places += kept.place
            places += rows_record(x)
        if len(sides) == 1:
            places += NO_SIDE
        elif len(sides) != 2:
            return False
        record = STORE.pack(
            *(len(sides), batch, heads, page, count),
            *records.steps(change),
            torch.get_num_threads(),
            *places,
        )
        perform("store", record)
        return True


def _unasked(request: Request, heads: int) -> str | None:
    """Why this is not computed, whatever it is asked of."""
    q = request.q
    if type(q) not in PLAIN:
        return f"queries in a {type(q).__name__}"
    if (group := q.shape[1] // heads) > MAX_GROUP:
        return f"{group} queries share a key head: {MAX_GROUP} at most"
    if q.dtype not in DTYPES or request.out_dtype not in DTYPES or q.stride(3) != 1:
        return f"queries of {q.dtype}, or not contiguous"
    if not isinstance(request.mask, Mask):
        return "a mask that is a tensor"
    return None


def arrangement(device: torch.device) -> Tiles | None:
    """How sealed pages are to lie in the memory of this device, so that they are read fastest."""
    native = device.type == "cpu" and library().functions is not None
    return LANES if native else None


__all__ = ["Native", "arrangement"]
