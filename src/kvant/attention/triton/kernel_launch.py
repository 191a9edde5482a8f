"""Launch attention: choose the tiles and ranges of a request, then run the two kernels.

The first kernel has one program per tile of queries and range of rows; each writes a partial
output. The second kernel merges the partial outputs of all ranges.
"""

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
from kvant.platform.torch_runtime import use_device

BLOCK_ROWS = 64  # most rows of an iteration; the rows of a sealed page are a multiple of it
MIN_RANGE_ROWS = 4 * BLOCK_ROWS  # a shorter range costs more to merge than it saves
MAX_PIPELINE_BYTES = 1 << 17  # for prefetched rows: leaves shared memory for a second program
MIN_TILE_QUERIES = 16  # smallest tile of a matrix product
MAX_POSITION = (1 << 31) - 1  # kernels count in 32 bits
MAX_PARTIAL_VALUES = 1 << 25  # partial outputs of one launch


@dataclass(frozen=True)
class KernelView:
    """The rows of one layer, and the page table of its sequences, as the kernels read them."""

    keys: TritonSide
    values: TritonSide
    page_table: TritonPageTable
    layer_group: LayerGroup
    new_rows_dense: bool = False  # whether all queries read the new rows dense
    selected_pages: Tensor | None = None  # sealed pages to read; None: all

    @classmethod
    def from_view(cls, view: View, selected_pages: Tensor | None = None) -> KernelView:
        new_rows = {name: align_rows(rows) for name, rows in (view.new_rows or {}).items()}
        keys, values = (
            TritonSide(get_form(stored.codec), stored.open, stored.sealed, new_rows.get(name))
            for name, stored in (("keys", view.keys), ("values", view.values))
        )
        page_table = TritonPageTable.from_page_table(view.page_table, view.keys.open.device)
        group = view.page_table.layer_group
        return cls(keys, values, page_table, group, view.new_rows_dense, selected_pages)

    @property
    def num_new(self) -> int:
        """Number of columns of the new rows."""
        return 0 if self.keys.new_rows is None else self.keys.new_rows.shape[2]

    @property
    def max_sealed_rows(self) -> int:
        """Upper bound on the sealed rows that are read of a sequence."""
        if self.selected_pages is None:
            return self.page_table.max_sealed_rows
        return self.selected_pages.shape[3] * self.layer_group.page


@dataclass(frozen=True)
class Tuning:
    """The settings of a launch of the first kernel that were fastest on an H100."""

    block_rows: int  # rows per iteration
    num_programs: int  # rows are split until there are as many; a large GPU has 132 multiprocessors
    num_warps: int
    num_stages: int  # of the compiler's pipeline, where shared memory suffices

    @classmethod
    def choose(cls, kernel_view: KernelView, tile_queries: int) -> Tuning:
        if tile_queries > MIN_TILE_QUERIES or not kernel_view.max_sealed_rows:
            # With 4 warps, the outputs of 64 queries would spill from registers.
            return cls(BLOCK_ROWS, 2 * 132, 4 if tile_queries < 64 else 8, 3)
        # Decoding codes waits more than it computes: twice the programs hide it. An iteration
        # loads a slot, then the rows of its page: three stages prefetch the rows of one block,
        # five those of two.
        narrow = all(side.form.bits in (2, 3, 4) for side in (kernel_view.keys, kernel_view.values))
        return cls(BLOCK_ROWS // 2, 4 * 132, *((2, 5) if narrow else (4, 3)))


@dataclass(frozen=True)
class LaunchPlan:
    """How the queries and rows of each sequence are split into programs."""

    tuning: Tuning
    tile_queries: int  # query rows of a tile, those of all heads of a group together
    num_tiles: int
    num_sealed_ranges: int
    num_dense_ranges: int  # at least one, which reads the sinks

    @classmethod
    def make(cls, kernel_view: KernelView, num_heads: int, num_queries: int) -> LaunchPlan:
        """Split for `num_heads` key heads of the batch with `num_queries` each.

        The longest sequence determines the number of ranges.
        """
        keys, values = kernel_view.keys.open, kernel_view.values.open
        max_tile = 32 if keys.dtype == torch.float32 else 64
        tile = min(max_tile, max(MIN_TILE_QUERIES, next_power_of_2(num_queries)))
        available = get_available_shared_bytes(keys.device)
        while tile > MIN_TILE_QUERIES and compute_shared_bytes(keys, values, tile) > available:
            tile //= 2
        tiles = -(-num_queries // tile)
        sealed_rows = kernel_view.max_sealed_rows
        dense_rows = max(kernel_view.page_table.max_open_rows, kernel_view.num_new)
        tuning = Tuning.choose(kernel_view, tile)
        ranges = max(1, tuning.num_programs // (num_heads * tiles))
        range_rows = max(MIN_RANGE_ROWS, -(-(sealed_rows + dense_rows) // ranges))
        range_rows = -(-range_rows // BLOCK_ROWS) * BLOCK_ROWS
        num_ranges = -(-sealed_rows // range_rows), max(1, -(-dense_rows // range_rows))
        return cls(tuning, tile, tiles, *num_ranges)

    @property
    def num_ranges(self) -> int:
        return self.num_sealed_ranges + self.num_dense_ranges


def launch_attention(
    request: AttentionRequest, kernel_view: KernelView
) -> tuple[Tensor, Tensor | None]:
    """Compute outputs and log-sum-exp, in launches whose partial outputs fit the scratch."""
    batch, heads, queries, _ = request.q.shape
    dim = kernel_view.values.open.shape[3]
    out = torch.empty(batch, heads, queries, dim, dtype=request.out_dtype, device=request.q.device)
    lse = out.new_empty(out.shape[:3], dtype=torch.float32) if request.return_lse else None
    step = max(1, MAX_PARTIAL_VALUES // (2 * batch * heads * dim))
    if kernel_view.selected_pages is not None:  # each position selects pages of its own
        step = 1
    with use_device(out.device):
        for first in range(0, queries, step):
            part = range(first, min(first + step, queries))
            _launch_queries(request, kernel_view, part, out, lse)
    return out, lse


def _launch_queries(
    request: AttentionRequest,
    kernel_view: KernelView,
    query_range: range,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Launch both kernels for a range of the request's queries."""
    from kvant.attention.triton.kernels import attend

    q, page_table = request.q[:, :, query_range.start : query_range.stop], kernel_view.page_table
    batch, all_heads, count, _ = q.shape
    heads, dim = kernel_view.keys.open.shape[1], kernel_view.values.open.shape[3]
    plan = LaunchPlan.make(kernel_view, batch * heads, count * (all_heads // heads))
    shape = (plan.num_ranges, batch, all_heads, count)
    sizes = (*shape, dim), shape, shape
    partials = import_kernel_records().PartialOutputs(
        *(out.new_empty(size, dtype=torch.float32) for size in sizes)
    )
    selected = kernel_view.selected_pages
    if selected is not None:
        selected = selected[:, :, query_range.start : query_range.stop].contiguous()
    attend.attend[plan.num_tiles * batch * heads, plan.num_ranges](
        partials,
        _make_attention_args(request, q, kernel_view, plan.tuning.block_rows),
        page_table.integers,
        page_table.integers.shape[1],
        page_table.open_offset,
        kernel_view.num_new,
        request.q.shape[2] - query_range.start,
        count,
        plan.num_sealed_ranges,
        page_table.integers if selected is None else selected,
        0 if selected is None else selected.shape[3],
        TILE=plan.tile_queries,
        num_warps=plan.tuning.num_warps,
        num_stages=_limit_num_stages(kernel_view, plan),
        enable_fp_fusion=True,
    )
    logits = None if request.sink_logits is None else request.sink_logits.contiguous()
    attend.merge[batch * all_heads * count,](
        partials,
        out,
        out if lse is None else lse,
        out if logits is None else logits,
        plan.num_ranges,
        count,
        query_range.start,
        request.q.shape[2],
        dim=dim,
        PADDED_DIM=next_power_of_2(dim),
        HEADS=all_heads,
        HAS_SINK_LOGITS=logits is not None,
        HAS_LSE=lse is not None,
        enable_fp_fusion=True,
    )


def compute_shared_bytes(
    keys: Tensor,
    values: Tensor,
    tile_queries: int,
    num_stages: int = 1,
    block_rows: int = BLOCK_ROWS,
) -> int:
    """Return an upper bound on a program's shared memory: blocks of rows, queries, weights."""
    size = max(keys.element_size(), values.element_size())
    blocks = _compute_block_bytes(block_rows, keys, values)
    rows = max(blocks) if num_stages == 1 else num_stages * sum(blocks)
    return rows + tile_queries * (next_power_of_2(keys.shape[3]) + block_rows) * size


@lru_cache(maxsize=64)
def get_available_shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory available to a program; unlimited without a GPU."""
    if device.type != "cuda":
        return sys.maxsize
    # AMD devices do not report it; they have 64 KiB.
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 1 << 16)


def _limit_num_stages(kernel_view: KernelView, plan: LaunchPlan) -> int:
    """Return the number of pipeline stages: as many prefetched blocks as shared memory holds."""
    keys, values, rows = kernel_view.keys.open, kernel_view.values.open, plan.tuning.block_rows
    block_bytes = sum(_compute_block_bytes(rows, keys, values))
    stages = max(1, min(plan.tuning.num_stages, MAX_PIPELINE_BYTES // block_bytes))
    available = get_available_shared_bytes(keys.device)
    while (
        stages > 1
        and compute_shared_bytes(keys, values, plan.tile_queries, stages, rows) > available
    ):
        stages -= 1
    return stages


def _compute_block_bytes(block_rows: int, *sides: Tensor) -> list[int]:
    """Return the bytes of a block of rows of each side."""
    return [block_rows * next_power_of_2(pages.shape[3]) * pages.element_size() for pages in sides]


def _make_attention_args(
    request: AttentionRequest, q: Tensor, kernel_view: KernelView, block_rows: int
) -> Any:
    flags = (
        request.q.shape[2] > 1,
        kernel_view.num_new > 0,
        kernel_view.selected_pages is not None,
    )
    return import_kernel_records().AttentionArgs(
        _make_query_args(request, q, kernel_view),
        _make_side_args(kernel_view.keys),
        _make_side_args(kernel_view.values),
        _make_visibility_args(request, kernel_view),
        make_constexpr(block_rows),
        *map(make_constexpr, flags),
    )


def _make_side_args(side: TritonSide) -> Any:
    pages = side.open
    return import_kernel_records().SideArgs(
        *make_side_constants(side.form, pages.shape[3], pages.dtype, pages.is_cpu),
        make_sealed_fields(side),
        make_dense_rows(pages),
        make_dense_rows(pages if side.new_rows is None else side.new_rows),
    )


def _make_query_args(request: AttentionRequest, q: Tensor, kernel_view: KernelView) -> Any:
    pages, cap = kernel_view.keys.open, request.softcap
    heads, scale = pages.shape[1], float(request.scale)
    query_scale = 2.0 ** (frexp(scale)[1] - 1)
    split = q.dtype != torch.bfloat16 and not q.is_cpu and pages.dtype == torch.bfloat16
    return import_kernel_records().QueryArgs(
        make_dense_rows(q),
        make_constexpr(heads),
        make_constexpr(q.shape[1] // heads),
        make_constexpr(split),
        query_scale,
        scale / query_scale,
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
