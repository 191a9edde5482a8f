"""Rows of a change on their way into pages: the first backend that does it for these sides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from kvant.attention.clamping import count_clamped
from kvant.attention.native import Native
from kvant.attention.reference import Reference
from kvant.attention.triton import Triton
from kvant.attention.writing import SEAL_AT_ONCE, rows_to_seal
from kvant.contracts import Fields, Stored, Tally
from kvant.extent import Change, Extent, Ints, Kind, Paging

STORES: list[Any] = [Native(), Triton(), Reference()]


def store(change: Change, rows: Fields, sides: Mapping[str, Stored], tally: Tally) -> None:
    """Copy, write and seal what a change says of the rows {side: [B, H, T, D]} that came."""
    for backend in STORES:
        if backend.store(change, rows, sides):
            if len(change.seals):
                tally.sealed[backend.name] += len(change.seals) * len(sides)
                _count_clamped(change, rows, sides, tally)
            return


def _count_clamped(change: Change, rows: Fields, sides: Mapping[str, Stored], tally: Tally) -> None:
    """But not the sinks, which nobody reads sealed."""
    sinks = change.before.kind.sinks
    for name, stored in sides.items():
        for first in range(0, len(change.seals), SEAL_AT_ONCE):
            seals = change.seals[first : first + SEAL_AT_ONCE]
            pages = rows_to_seal(seals, rows[name], stored)
            position = seals[:, 3] + change.before.lengths[seals[:, 0]]  # of the first row
            for page in np.flatnonzero(position < sinks).tolist():
                pages[page, :, : sinks - int(position[page])] = 0  # of what are copies
            count_clamped(stored.codec, pages, name, tally)


def seal_into(stored: Stored, name: str, rows: Tensor, slots: Ints, tally: Tally) -> None:
    """Seal whole pages [n, H, P, D] of one side into these slots."""
    seals = np.stack([np.arange(len(slots)), slots, np.full(len(slots), -1), slots * 0], 1)
    nowhere = Extent.empty(Kind(Paging(rows.shape[2], 0)), [0] * len(rows))
    change = Change(nowhere, nowhere, nowhere, rows.shape[2], seals=seals)
    store(change, {name: rows}, {name: stored}, tally)
