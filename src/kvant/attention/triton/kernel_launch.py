"""One request: how many queries and columns a program takes, and the two launches."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from math import frexp
from typing import Any

import torch
from torch import Tensor

from kvant.attention.triton.arguments import (
    TritonPageTable,
    TritonSide,
    align_rows,
    get_form,
    import_kernel_records,
    make_constexpr,
    make_dense_rows,
    make_sealed_fields,
    make_side_constants,
    next_power_of_2,
)
from kvant.contracts import AttentionRequest, Mask, View
from kvant.page_table import LayerGroup
from kvant.triton_runtime import use_device

BLOCK_ROWS = 64  # rows at a time: every sealed page is a multiple of it
TARGET_PROGRAMS = (
    264  # two for each multiprocessor of the larger GPUs: ranges are split until there are
)
MIN_RANGE_ROWS = 4 * BLOCK_ROWS  # rows a range: less is not worth a merge
MAX_PIPELINE_BYTES = (
    1 << 17
)  # bytes for rows on their way: more would leave no room for a second program
MIN_TILE_QUERIES = 16  # queries that a program takes at least: a matrix product does
MAX_POSITION = (1 << 31) - 1  # beyond any position; kernels count in 32 bits
MAX_PARTIAL_VALUES = 1 << 25  # values that ranges give before they are merged, at a time


@dataclass(frozen=True)
class KernelView:
    """What kernels read: the rows of one layer, and where its sequences are."""

    keys: TritonSide
    values: TritonSide
    page_table: TritonPageTable
    layer_group: LayerGroup
    new_rows_dense: bool = False  # are own rows dense to all queries?
    selected_pages: Tensor | None = None  # sealed pages, where not all are read

    @classmethod
    def from_view(cls, view: View, selected_pages: Tensor | None = None) -> KernelView:
        own = (
            {}
            if view.new_rows is None
            else {n: align_rows(rows) for n, rows in view.new_rows.items()}
        )
        keys, values = (
            TritonSide(get_form(stored.codec), stored.open, stored.sealed, own.get(name))
            for name, stored in (("keys", view.keys), ("values", view.values))
        )
        place = TritonPageTable.from_page_table(view.page_table, view.keys.open.device)
        return cls(
            keys, values, place, view.page_table.layer_group, view.new_rows_dense, selected_pages
        )

    @property
    def num_new(self) -> int:
        """The columns that came with the forward itself."""
        return 0 if self.keys.new_rows is None else self.keys.new_rows.shape[2]

    @property
    def max_sealed_rows(self) -> int:
        """Sealed rows of a sequence that are read, at most."""
        return (
            self.page_table.max_sealed_rows
            if self.selected_pages is None
            else self.selected_pages.shape[3] * self.layer_group.page
        )


@dataclass(frozen=True)
class LaunchPlan:
    """How so many queries of each sequence are cut into programs."""

    tile_queries: int  # queries of a group, all its heads together
    num_tiles: int
    num_sealed_ranges: int  # ranges of sealed pages; of dense rows one at least: it reads the sinks
    num_dense_ranges: int

    @classmethod
    def make(cls, kernel_view: KernelView, num_heads: int, num_queries: int) -> LaunchPlan:
        """For so many key heads in all, and queries of each; ranges are for the longest."""
        both = kernel_view.keys.open, kernel_view.values.open
        widest = 32 if both[0].dtype == torch.float32 else 64
        tile = min(widest, max(MIN_TILE_QUERIES, next_power_of_2(num_queries)))
        while tile > MIN_TILE_QUERIES and compute_shared_bytes(
            *both, tile, 1
        ) > get_available_shared_bytes(both[0].device):
            tile //= 2
        tiles = -(-num_queries // tile)
        stored, dense = (
            kernel_view.max_sealed_rows,
            max(kernel_view.page_table.max_open_rows, kernel_view.num_new),
        )
        ranges = max(1, TARGET_PROGRAMS // (num_heads * tiles))
        span = max(MIN_RANGE_ROWS, -(-(stored + dense) // ranges))
        span = -(-span // BLOCK_ROWS) * BLOCK_ROWS
        return cls(tile, tiles, -(-stored // span), max(1, -(-dense // span)))

    @property
    def num_ranges(self) -> int:
        return self.num_sealed_ranges + self.num_dense_ranges


def launch_attention(
    request: AttentionRequest, kernel_view: KernelView
) -> tuple[Tensor, Tensor | None]:
    """Outputs and log-sum-exp, of as many queries at a time as the scratch allows."""
    batch, heads, queries, _ = request.q.shape
    dim = kernel_view.values.open.shape[3]
    out = torch.empty(batch, heads, queries, dim, dtype=request.out_dtype, device=request.q.device)
    lse = out.new_empty(out.shape[:3], dtype=torch.float32) if request.return_lse else None
    # Each position chooses for itself.
    step = (
        max(1, MAX_PARTIAL_VALUES // (2 * batch * heads * dim))
        if kernel_view.selected_pages is None
        else 1
    )
    with use_device(out.device):
        for first in range(0, queries, step):
            _launch_queries(
                request, kernel_view, range(first, min(first + step, queries)), out, lse
            )
    return out, lse


def _launch_queries(
    request: AttentionRequest,
    kernel_view: KernelView,
    query_range: range,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """These of the queries that are asked for."""
    from kvant.attention.triton.kernels import attend

    q, place = request.q[:, :, query_range.start : query_range.stop], kernel_view.page_table
    batch, all_heads, count, _ = q.shape
    heads, dim = kernel_view.keys.open.shape[1], kernel_view.values.open.shape[3]
    plan = LaunchPlan.make(kernel_view, batch * heads, count * (all_heads // heads))
    shape = (plan.num_ranges, batch, all_heads, count)
    sizes = (*shape, dim), shape, shape
    found = import_kernel_records().PartialOutputs(
        *(out.new_empty(size, dtype=torch.float32) for size in sizes)
    )
    chosen = kernel_view.selected_pages
    if chosen is not None:
        chosen = chosen[:, :, query_range.start : query_range.stop].contiguous()
    attend.attend[plan.num_tiles * batch * heads, plan.num_ranges](
        found,
        _make_query_args(request, q, kernel_view),
        _make_side_args(kernel_view.keys),
        _make_side_args(kernel_view.values),
        place.integers,
        place.integers.shape[1],
        place.open_offset,
        _make_visibility_args(request, kernel_view),
        kernel_view.num_new,
        request.q.shape[2] - query_range.start,
        count,
        plan.num_sealed_ranges,
        place.integers if chosen is None else chosen,
        0 if chosen is None else chosen.shape[3],
        TILE=plan.tile_queries,
        BLOCK=BLOCK_ROWS,
        MULTI_QUERY=request.q.shape[2] > 1,
        HAS_NEW_ROWS=kernel_view.num_new > 0,
        HAS_SELECTION=chosen is not None,
        num_warps=4 if plan.tile_queries < 64 else 8,  # or weighted sums spill from the registers
        num_stages=_choose_num_stages(kernel_view, plan.tile_queries),
        enable_fp_fusion=True,
    )
    _merge_partials(found, request, plan.num_ranges, query_range, out, lse)


def _merge_partials(
    partials: Any,
    request: AttentionRequest,
    num_ranges: int,
    query_range: range,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """What the ranges gave `which` of the queries."""
    from kvant.attention.triton.kernels import attend

    (batch, heads, queries, dim), logits = out.shape, request.sink_logits
    if logits is not None:
        logits = logits.contiguous()
    attend.merge[batch * heads * len(query_range),](
        partials,
        out,
        out if lse is None else lse,
        out if logits is None else logits,
        num_ranges,
        len(query_range),
        query_range.start,
        queries,
        dim=dim,
        PADDED_DIM=next_power_of_2(dim),
        HEADS=heads,
        HAS_SINK_LOGITS=logits is not None,
        HAS_LSE=lse is not None,
        enable_fp_fusion=True,
    )


def compute_shared_bytes(keys: Tensor, values: Tensor, tile_queries: int, num_stages: int) -> int:
    """Bytes of shared memory that a program takes, at most: blocks of rows, queries, weights."""
    size = max(keys.element_size(), values.element_size())
    blocks = _compute_block_bytes(keys, values)
    rows = max(blocks) if num_stages == 1 else num_stages * sum(blocks)
    return rows + tile_queries * (next_power_of_2(keys.shape[3]) + BLOCK_ROWS) * size


@lru_cache(maxsize=64)
def get_available_shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that a program may take; without a GPU nobody counts them."""
    if device.type != "cuda":
        return sys.maxsize
    # What is not said, as of AMD's, is 64 KiB.
    there = torch.cuda.get_device_properties(device)
    return getattr(there, "shared_memory_per_block_optin", 1 << 16)


def _choose_num_stages(kernel_view: KernelView, tile_queries: int) -> int:
    """How many blocks of rows are loaded ahead: as many as the shared memory has room for."""
    both = kernel_view.keys.open, kernel_view.values.open
    most = max(1, min(3, MAX_PIPELINE_BYTES // sum(_compute_block_bytes(*both))))
    room = get_available_shared_bytes(both[0].device)
    return next(
        (n for n in range(most, 1, -1) if compute_shared_bytes(*both, tile_queries, n) <= room), 1
    )


def _compute_block_bytes(*sides: Tensor) -> list[int]:
    """Bytes of a block of keys, and of one of values."""
    return [BLOCK_ROWS * next_power_of_2(pages.shape[3]) * pages.element_size() for pages in sides]


def _make_side_args(side: TritonSide) -> Any:
    paged = side.open
    return import_kernel_records().SideArgs(
        *make_side_constants(side.form, paged.shape[3], paged.dtype, paged.is_cpu),
        make_sealed_fields(side),
        make_dense_rows(paged),
        make_dense_rows(paged if side.new_rows is None else side.new_rows),
    )


def _make_query_args(request: AttentionRequest, q: Tensor, kernel_view: KernelView) -> Any:
    paged, cap = kernel_view.keys.open, request.softcap
    heads, scale = paged.shape[1], float(request.scale)
    before = 2.0 ** (frexp(scale)[1] - 1)
    split = q.dtype != torch.bfloat16 and not q.is_cpu and paged.dtype == torch.bfloat16
    return import_kernel_records().QueryArgs(
        make_dense_rows(q),
        make_constexpr(heads),
        make_constexpr(q.shape[1] // heads),
        make_constexpr(split),
        before,
        scale / before,
        make_constexpr(cap is not None),
        float(cap or 0.0),
    )


def _make_visibility_args(request: AttentionRequest, kernel_view: KernelView) -> Any:
    mask, paging = request.mask, kernel_view.layer_group.paging
    assert isinstance(mask, Mask)
    return import_kernel_records().VisibilityArgs(
        make_constexpr(mask.causal),
        make_constexpr(mask.window is not None),
        min(mask.window or 0, MAX_POSITION),
        min(mask.sinks, MAX_POSITION),
        make_constexpr(mask.chunk is not None),
        min(mask.chunk or 0, MAX_POSITION),
        make_constexpr(paging.page),
        -1 if paging.tail is None else min(paging.tail, MAX_POSITION),
        min(paging.dense_until, MAX_POSITION),
        min(kernel_view.layer_group.sinks, MAX_POSITION),
        make_constexpr(kernel_view.new_rows_dense and kernel_view.num_new > 0),
    )
