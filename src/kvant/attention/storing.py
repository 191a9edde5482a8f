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

from kvant.attention.native import Native
from kvant.attention.reference import Reference
from kvant.attention.triton import Triton
from kvant.attention.writing import SEAL_AT_ONCE, rows_to_seal
from kvant.contracts import Codec, Fields, Stored, Tally
from kvant.extent import LENGTH, NUMBERS, Change, Extent, Ints, Kind, Paging

STORES: list[Any] = [Native(), Triton(), Reference()]


def store(change: Change, rows: Fields, sides: Mapping[str, Stored], tally: Tally) -> None:
    """Copy, write and seal what a change says of the rows {side: [B, H, T, D]} that came."""
    for backend in STORES:
        if backend.store(change, rows, sides):
            if len(change.seals):
                count_sealed(change, rows, sides, tally, backend.name)
            return


def no_rows(change: Change, sides: Mapping[str, Stored]) -> Fields:
    """Rows of no columns."""
    return {
        name: side.open.new_empty(change.before.tables, side.heads, 0, side.dim)
        for name, side in sides.items()
    }


def count_sealed(
    change: Change, rows: Fields, sides: Mapping[str, Stored], tally: Tally, backend: str
) -> None:
    """Pages were sealed, from rows in open pages and from those that came."""
    tally.sealed[backend] += len(change.seals) * len(sides)
    _count_clamped(change, rows, sides, tally)


def _count_clamped(change: Change, rows: Fields, sides: Mapping[str, Stored], tally: Tally) -> None:
    """But not the sinks, which nobody reads sealed."""
    sinks = change.before.kind.sinks
    for name, stored in sides.items():
        due = change.seals
        if _within(rows[name], stored.codec.limit):
            due = due[due[:, 2] >= 0]  # pages with rows that came before
        for first in range(0, len(due), SEAL_AT_ONCE):
            seals = due[first : first + SEAL_AT_ONCE]
            pages = rows_to_seal(seals, rows[name], stored)
            position = seals[:, 3] + change.before.lengths[seals[:, 0]]  # of the first row
            for page in np.flatnonzero(position < sinks).tolist():
                pages[page, :, : sinks - int(position[page])] = 0  # of what are copies
            count_clamped(stored.codec, pages, name, tally)


def seal_into(
    stored: Stored, name: str, rows: Tensor, slots: Ints, first: Ints, sinks: int, tally: Tally
) -> None:
    """Seal whole pages [n, H, P, D] of one side, from positions `first` on, into these slots."""
    numbers = np.zeros((len(slots), NUMBERS), np.int64)
    numbers[:, LENGTH] = first
    none = np.zeros((len(slots), 0), np.int64)
    here = Extent(Kind(Paging(rows.shape[2], 0), sinks=sinks), numbers, none, none)
    seals = np.stack([np.arange(len(slots)), slots, np.full(len(slots), -1), slots * 0], 1)
    change = Change(here, here, here, rows.shape[2], seals=seals)
    store(change, {name: rows}, {name: stored}, tally)


log = logging.getLogger("kvant")


def count_clamped(codec: Codec, rows: Tensor, side: str, tally: Tally) -> None:
    """Count in `tally` the finite values of rows to be sealed that are beyond the codec's limit."""
    limit = codec.limit
    if type(rows) is not Tensor or _within(rows, limit):  # some modes have tensors without values
        return
    if rows.device.type != "cpu":  # nobody waits for a device here: who asks for stats does
        tally.clamped = tally.clamped + _beyond(rows, limit).sum()
        return
    beyond = rows[_beyond(rows, limit)].abs()
    if beyond.numel() == 0:  # infinities and NaN alone, which come back as NaN
        return
    tally.clamped += beyond.numel()
    if "clamped" not in tally.told:
        tally.told.add("clamped")
        log.warning(
            "%s of %g in a format that stores magnitudes up to %g: larger ones are stored as that, "
            "and counted in stats()['clamped']; 'raw' stores them as they are, and 'smooth' or "
            "'rotate' may bring them within reach",
            side,
            float(beyond.max()),
            limit,
        )


def _within(rows: Tensor, limit: float) -> bool:
    """Is no value beyond? False where that takes waiting for a device, or is not known."""
    if torch.finfo(rows.dtype).max <= limit or rows.numel() == 0:
        return True
    if type(rows) is not Tensor or rows.device.type != "cpu":
        return False
    # Not `aminmax`, which copies rows that lie apart: scratch that the allocator keeps.
    return -limit <= float(rows.amin()) and float(rows.amax()) <= limit


def _beyond(rows: Tensor, limit: float) -> Tensor:
    """Which values are finite and beyond; in float32, since a limit need not be a bfloat16."""
    return (rows.to(torch.float32).abs() > limit) & rows.isfinite()
