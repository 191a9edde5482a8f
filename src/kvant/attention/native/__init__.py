"""The CPU backend: C++ kernels that read the stored bytes, behind a plain C interface.

It stores rows, and reads raw, affine, codebook and fp8 pages. One call per layer serves all
sequences; one pass over the rows serves all queries of a key head. `supports` returns the reason
for each view that the backend refuses. Sealed pages must be arranged in the tiles of `NativeTiles`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvant.attention.native import structs
from kvant.attention.native.structs import KEYS_SIDE, NATIVE_TILES, SIDES, VALUES_SIDE
from kvant.attention.page_selection import compute_page_ranges, refresh_summary
from kvant.contracts import AttentionRequest, Fields, Mask, PagedTensors, Tiles, View
from kvant.native import DTYPE_CODES, call_native, get_library, make_rows_record
from kvant.native.header import (
    ATTEND_STRUCT,
    CHOOSE_STRUCT,
    NULL_POINTER,
    ROWS_STRUCT,
    STORE_SIDE_STRUCT,
    STORE_STRUCT,
)
from kvant.page_table import AppendPlan

MAX_GROUP = 16  # query heads per key head in the kernels
CPU = torch.device("cpu")
PLAIN_TENSOR_TYPES = (Tensor, torch.nn.Parameter)  # subclasses may have no storage
NULL_ROWS = ROWS_STRUCT.null
NULL_PAGES = (*NULL_POINTER, 0)  # in place of selected pages: every page is read


class NativeBackend:
    """Stores rows and attends over pages with the compiled kernels."""

    name = "native"

    @property
    def fast_prefill(self) -> bool:
        return get_library().isa not in ("", "plain")

    def supports(self, view: View, request: AttentionRequest | None = None) -> str | None:
        if get_library().functions is None:
            return get_library().reason
        if view.values is view.keys:
            return "values stored inside the keys"
        keys, values = structs.get_side(view.keys, "keys"), structs.get_side(view.values, "values")
        if (reason := keys.read_refusal or values.read_refusal) is not None:
            return reason
        if view.new_rows is not None:
            for name, side in (("keys", keys), ("values", values)):
                x = view.new_rows[name]
                if type(x) is not Tensor or x.dtype != side.dtype or x.stride(3) != 1:
                    return f"new {name} in a {type(x).__name__} of {x.dtype}, or not contiguous"
        return None if request is None else _explain_unsupported_request(request, keys.heads)

    def select_pages(self, request: AttentionRequest, view: View) -> Tensor | None:
        q, keys, mask = request.q, view.keys, request.mask
        assert isinstance(mask, Mask)
        batch, all_heads, queries, dim = q.shape
        page_ranges = compute_page_ranges(view, mask, queries)
        if page_ranges is None:
            return None
        ranges, width = page_ranges
        bounds = refresh_summary(view).bounds
        slot, head, _, _ = bounds.stride()
        selected = torch.empty((batch, keys.heads, queries, width), dtype=torch.int64, device=CPU)
        record = CHOOSE_STRUCT.pack(
            *structs.get_page_table_pointer(view.page_table),
            *(keys.heads, all_heads // keys.heads, queries, dim),
            *(*make_rows_record(q), DTYPE_CODES[q.dtype]),
            *(bounds.data_ptr(), bounds.nbytes, slot * bounds.itemsize, head * bounds.itemsize),
            *(DTYPE_CODES[bounds.dtype], *structs.get_pointer(ranges)),
            *(selected.data_ptr(), selected.nbytes, width, torch.get_num_threads()),
        )
        call_native("choose", record)
        return selected

    def attend(self, request: AttentionRequest, view: View) -> tuple[Tensor, Tensor | None]:
        keys = view.keys.derived.get(KEYS_SIDE) or structs.get_side(view.keys, "keys")
        values = view.values.derived.get(VALUES_SIDE) or structs.get_side(view.values, "values")
        new_rows, q, mask, logits = view.new_rows, request.q, request.mask, request.sink_logits
        selected, out_dtype = request.selected_pages, request.out_dtype
        num_new = 0 if new_rows is None else new_rows["keys"].shape[2]
        assert isinstance(mask, Mask)
        batch, heads, queries, dim = q.shape
        if values.dim == dim and out_dtype is q.dtype and q.is_contiguous():
            out = torch.empty_like(q)  # twice as fast as torch.empty
        else:
            shape = batch, heads, queries, values.dim
            out = torch.empty(shape, dtype=out_dtype, device=CPU)
        assert type(out) is Tensor, "the mode makes outputs without storage"
        lse = out.new_empty(out.shape[:3], dtype=torch.float32) if request.return_lse else None
        if logits is not None:
            logits = logits.float().contiguous()
        record = ATTEND_STRUCT.pack(
            *keys.record_pointer,
            *values.record_pointer,
            *structs.get_page_table_pointer(view.page_table),
            *(keys.heads, heads // keys.heads, queries),
            *(NULL_ROWS if new_rows is None else make_rows_record(new_rows["keys"])),
            *(NULL_ROWS if new_rows is None else make_rows_record(new_rows["values"])),
            *(num_new, num_new if view.new_rows_dense else 0),
            *(mask.causal, mask.window or 0, mask.sinks, mask.chunk or 0),
            *(request.scale, request.softcap or 0.0),
            *(NULL_POINTER if logits is None else (logits.data_ptr(), logits.nbytes)),
            *(
                *make_rows_record(q),
                DTYPE_CODES[q.dtype],
                out.data_ptr(),
                out.nbytes,
                DTYPE_CODES[out.dtype],
            ),
            *(NULL_POINTER if lse is None else (lse.data_ptr(), lse.nbytes)),
            *(
                NULL_PAGES
                if selected is None
                else (selected.data_ptr(), selected.nbytes, selected.shape[3])
            ),
            torch.get_num_threads(),
        )
        call_native("attend", record)
        return out, lse

    def store(self, plan: AppendPlan, rows: Fields, sides: Mapping[str, PagedTensors]) -> bool:
        """Apply `plan` to the new rows; return False, with nothing written, if unsupported.

        A plan that reopens sealed pages is unsupported.
        """
        if get_library().functions is None or len(plan.reopens) or torch.compiler.is_compiling():
            return False
        batch, count = len(plan.new_table.numbers), plan.num_new
        heads = page = 0
        side_records: list[int] = []
        for name, stored in sides.items():
            side = stored.derived.get(SIDES[name]) or structs.get_side(stored, name)
            x = rows[name]
            heads, page = side.heads, side.page
            if side.store_refusal is not None or type(x) is not Tensor or x.dtype != side.dtype:
                return False
            if x.shape != (batch, heads, count, side.dim) or x.stride(3) != 1:
                return False
            side_records += side.record_pointer
            side_records += make_rows_record(x)
        if len(sides) == 1:
            side_records += STORE_SIDE_STRUCT.null
        elif len(sides) != 2:
            return False
        record = STORE_STRUCT.pack(
            *(len(sides), batch, heads, page, count),
            *structs.get_plan_pointer(plan),
            torch.get_num_threads(),
            *side_records,
        )
        call_native("store", record)
        return True


def _explain_unsupported_request(request: AttentionRequest, num_heads: int) -> str | None:
    """Return why the kernels cannot compute this request, or None."""
    q = request.q
    if type(q) not in PLAIN_TENSOR_TYPES:
        return f"queries in a {type(q).__name__}"
    if (group := q.shape[1] // num_heads) > MAX_GROUP:
        return f"{group} query heads per key head: at most {MAX_GROUP} are supported"
    if q.dtype not in DTYPE_CODES or request.out_dtype not in DTYPE_CODES or q.stride(3) != 1:
        return f"queries of {q.dtype}, or not contiguous"
    if not isinstance(request.mask, Mask):
        return "an explicit mask tensor"
    return None


def select_tiles(device: torch.device) -> Tiles | None:
    """Return the tiles in which the device's fastest backend reads sealed pages.

    None: the canonical order of files.
    """
    native = device.type == "cpu" and get_library().functions is not None
    return NATIVE_TILES if native else None


__all__ = ["NativeBackend", "select_tiles"]
