"""Rows of a change on their way into pages: the first backend that does it for these sides.

Values beyond what their codec stores are counted, and said once a cache: as rows are sealed, in the
frame of the codec; rows that stay dense are not concerned.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvant.attention.native import NativeBackend
from kvant.attention.reference import ReferenceBackend
from kvant.attention.triton import TritonBackend
from kvant.attention.write_rows import MAX_PAGES_PER_SEAL, gather_rows_to_seal
from kvant.contracts import Codec, Fields, LayerStats, PagedTensors
from kvant.page_table import (
    LENGTH,
    NUM_SEQUENCE_NUMBERS,
    AppendPlan,
    Ints,
    LayerGroup,
    PageTable,
    Paging,
)

STORE_BACKENDS: list[Any] = [NativeBackend(), TritonBackend(), ReferenceBackend()]


def store_rows(
    plan: AppendPlan, rows: Fields, sides: Mapping[str, PagedTensors], stats: LayerStats
) -> None:
    """Copy, write and seal what a change says of the rows {side: [B, H, T, D]} that came."""
    for backend in STORE_BACKENDS:
        if backend.store(plan, rows, sides):
            if len(plan.seals):
                count_sealed_pages(plan, rows, sides, stats, backend.name)
            return


def make_empty_rows(plan: AppendPlan, sides: Mapping[str, PagedTensors]) -> Fields:
    """Rows of no columns."""
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
    """Pages were sealed, from rows in open pages and from those that came."""
    stats.sealed_pages[backend] += len(plan.seals) * len(sides)
    _count_clamped_rows(plan, rows, sides, stats)


def _count_clamped_rows(
    plan: AppendPlan, rows: Fields, sides: Mapping[str, PagedTensors], stats: LayerStats
) -> None:
    """But not the sinks, which nobody reads sealed."""
    sinks = plan.old_table.layer_group.sinks
    for name, stored in sides.items():
        due = plan.seals
        if _is_within_limit(rows[name], stored.codec.limit):
            due = due[due[:, 2] >= 0]  # pages with rows that came before
        for first in range(0, len(due), MAX_PAGES_PER_SEAL):
            seals = due[first : first + MAX_PAGES_PER_SEAL]
            pages = gather_rows_to_seal(seals, rows[name], stored)
            position = seals[:, 3] + plan.old_table.lengths[seals[:, 0]]  # of the first row
            for page in np.flatnonzero(position < sinks).tolist():
                pages[page, :, : sinks - int(position[page])] = 0  # of what are copies
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
    """Seal whole pages [n, H, P, D] of one side, from positions `first` on, into these slots."""
    numbers = np.zeros((len(slots), NUM_SEQUENCE_NUMBERS), np.int64)
    numbers[:, LENGTH] = first_positions
    none = np.zeros((len(slots), 0), np.int64)
    here = PageTable(LayerGroup(Paging(rows.shape[2], 0), sinks=num_sinks), numbers, none, none)
    seals = np.stack([np.arange(len(slots)), slots, np.full(len(slots), -1), slots * 0], 1)
    change = AppendPlan(here, here, here, rows.shape[2], seals=seals)
    store_rows(change, {name: rows}, {name: tensors}, stats)


logger = logging.getLogger("kvant")


def count_clamped_values(codec: Codec, rows: Tensor, side: str, stats: LayerStats) -> None:
    """Count in `tally` the finite values of rows to be sealed that are beyond the codec's limit."""
    limit = codec.limit
    if type(rows) is not Tensor or _is_within_limit(
        rows, limit
    ):  # some modes have tensors without values
        return
    if rows.device.type != "cpu":  # nobody waits for a device here: who asks for stats does
        stats.clamped_values = stats.clamped_values + _mask_clamped_values(rows, limit).sum()
        return
    beyond = rows[_mask_clamped_values(rows, limit)].abs()
    if beyond.numel() == 0:  # infinities and NaN alone, which come back as NaN
        return
    stats.clamped_values += beyond.numel()
    if "clamped" not in stats.warned:
        stats.warned.add("clamped")
        logger.warning(
            "%s of %g in a format that stores magnitudes up to %g: larger ones are stored as that, "
            "and counted in stats()['clamped']; 'raw' stores them as they are, and 'smooth' or "
            "'rotate' may bring them within reach",
            side,
            float(beyond.max()),
            limit,
        )


def _is_within_limit(rows: Tensor, limit: float) -> bool:
    """Is no value beyond? False where that takes waiting for a device, or is not known."""
    if torch.finfo(rows.dtype).max <= limit or rows.numel() == 0:
        return True
    if type(rows) is not Tensor or rows.device.type != "cpu":
        return False
    # Not `aminmax`, which copies rows that lie apart: scratch that the allocator keeps.
    return -limit <= float(rows.amin()) and float(rows.amax()) <= limit


def _mask_clamped_values(rows: Tensor, limit: float) -> Tensor:
    """Which values are finite and beyond; in float32, since a limit need not be a bfloat16."""
    return (rows.to(torch.float32).abs() > limit) & rows.isfinite()
