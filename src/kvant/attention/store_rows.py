"""Store rows with the first backend that supports the plan, and count clamped values.

A codec clamps values beyond its limit when it seals a page. They are counted in the codec's frame,
and logged once per cache. Rows that stay dense are never clamped.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kvant.attention.native import NativeBackend
from kvant.attention.reference import ReferenceBackend
from kvant.attention.triton import TritonBackend
from kvant.attention.write_rows import MAX_PAGES_PER_SEAL, gather_rows_to_seal
from kvant.contracts import Backend, Codec, Fields, LayerStats, PagedTensors
from kvant.page_table import (
    LENGTH,
    NUM_SEQUENCE_NUMBERS,
    SEAL_COLUMN,
    SEAL_SOURCE,
    SEAL_TABLE,
    AppendPlan,
    Ints,
    LayerGroup,
    PageTable,
    Paging,
)

STORE_BACKENDS: list[Backend] = [NativeBackend(), TritonBackend(), ReferenceBackend()]


def store_rows(
    plan: AppendPlan, rows: Fields, sides: Mapping[str, PagedTensors], stats: LayerStats
) -> None:
    """Apply `plan` to the new rows {side: [B, H, T, D]} with the first backend that can."""
    for backend in STORE_BACKENDS:
        if backend.store(plan, rows, sides):
            if len(plan.seals):
                count_sealed_pages(plan, rows, sides, stats, backend.name)
            return


def make_empty_rows(plan: AppendPlan, sides: Mapping[str, PagedTensors]) -> Fields:
    """Return new rows without columns, for a plan that appends no token."""
    return {
        name: side.open.new_empty(plan.old_table.num_tables, side.heads, 0, side.dim)
        for name, side in sides.items()
    }


def count_sealed_pages(
    plan: AppendPlan,
    rows: Fields,
    sides: Mapping[str, PagedTensors],
    stats: LayerStats,
    backend: str,
) -> None:
    """Count the pages that `plan` sealed, and the values clamped in them."""
    stats.sealed_pages[backend] += len(plan.seals) * len(sides)
    _count_clamped_rows(plan, rows, sides, stats)


def _count_clamped_rows(
    plan: AppendPlan, rows: Fields, sides: Mapping[str, PagedTensors], stats: LayerStats
) -> None:
    """Count clamped values of sealed pages, except those of sinks, which are read dense."""
    sinks = plan.old_table.layer_group.sinks
    for name, stored in sides.items():
        all_seals = plan.seals
        if _is_within_limit(rows[name], stored.codec.limit):
            all_seals = all_seals[all_seals[:, SEAL_SOURCE] >= 0]  # pages with older rows
        for first in range(0, len(all_seals), MAX_PAGES_PER_SEAL):
            seals = all_seals[first : first + MAX_PAGES_PER_SEAL]
            pages = gather_rows_to_seal(seals, rows[name], stored)
            lengths = plan.old_table.lengths[seals[:, SEAL_TABLE]]
            first_positions = seals[:, SEAL_COLUMN] + lengths
            for page in np.flatnonzero(first_positions < sinks).tolist():
                pages[page, :, : sinks - int(first_positions[page])] = 0  # `pages` is a copy
            count_clamped_values(stored.codec, pages, name, stats)


def seal_pages(
    tensors: PagedTensors,
    name: str,
    rows: Tensor,
    slots: Ints,
    first_positions: Ints,
    num_sinks: int,
    stats: LayerStats,
) -> None:
    """Seal whole pages [n, H, P, D] of one side into `slots`, from `first_positions` on."""
    numbers = np.zeros((len(slots), NUM_SEQUENCE_NUMBERS), np.int64)
    numbers[:, LENGTH] = first_positions
    empty = np.zeros((len(slots), 0), np.int64)
    group = LayerGroup(Paging(rows.shape[2], 0), sinks=num_sinks)
    page_table = PageTable(group, numbers, empty, empty)
    seals = np.stack([np.arange(len(slots)), slots, np.full(len(slots), -1), slots * 0], 1)
    plan = AppendPlan(page_table, page_table, page_table, rows.shape[2], seals=seals)
    store_rows(plan, {name: rows}, {name: tensors}, stats)


logger = logging.getLogger("kvant")


def count_clamped_values(codec: Codec, rows: Tensor, side: str, stats: LayerStats) -> None:
    """Add to `stats` the finite values of `rows` that exceed the codec's limit."""
    limit = codec.limit
    if type(rows) is not Tensor or _is_within_limit(rows, limit):  # fake tensors have no values
        return
    if rows.device.type != "cpu":  # stays on the device: reading the stats synchronizes
        stats.clamped_values = stats.clamped_values + _mask_clamped_values(rows, limit).sum()
        return
    clamped = rows[_mask_clamped_values(rows, limit)].abs()
    if clamped.numel() == 0:  # only infinities and NaN, which decode to NaN
        return
    stats.clamped_values += clamped.numel()
    if "clamped" not in stats.warned:
        stats.warned.add("clamped")
        logger.warning(
            "%s of %g in a format that stores magnitudes up to %g: larger values are clamped to it "
            "and counted in stats()['clamped']; 'raw' stores them exactly, and 'smooth' or "
            "'rotate' may bring them within the limit",
            side,
            float(clamped.max()),
            limit,
        )


def _is_within_limit(rows: Tensor, limit: float) -> bool:
    """Tell whether no value exceeds `limit`; False where that is unknown without a device sync."""
    if torch.finfo(rows.dtype).max <= limit or rows.numel() == 0:
        return True
    if type(rows) is not Tensor or rows.device.type != "cpu":
        return False
    # Not `aminmax`, which copies strided rows into scratch that the allocator then retains.
    return -limit <= float(rows.amin()) and float(rows.amax()) <= limit


def _mask_clamped_values(rows: Tensor, limit: float) -> Tensor:
    """Return which values are finite and beyond `limit`.

    Compares in float32, since bfloat16 may not represent the limit.
    """
    return (rows.to(torch.float32).abs() > limit) & rows.isfinite()
