"""Where sequences are, as kernels read it: one tensor, a row for each sequence.

A row begins with the numbers of the extent and the most tokens that memory is known for; then come
the slots of sealed pages and those of open pages, by page number (kernels/records.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvant.extent import LENGTH, PADDING, Extent, Ints, Kind
from kvant.lasting import lasting

NUMBERS = 7


@dataclass(eq=False)
class Place:
    """The integers of an extent on a device."""

    rows: Tensor  # [B, NUMBERS + sealed pages + open pages]
    open_at: int  # where the table of open pages begins
    stored: int  # sealed rows of the sequence that has most
    opened: int  # and rows in open pages

    @classmethod
    def of(cls, extent: Extent, device: torch.device) -> Place:
        """Made once an extent, for all its layers."""
        key = ("place", device)
        found: Place | None = extent.memo.get(key)
        if found is None:
            page = extent.kind.page
            stored = int((extent.stop_sealed - extent.first_sealed).max(initial=0)) * page
            opened = int((extent.rows - extent.first_open * page).max(initial=0))
            widths = _widths(extent)
            rows = torch.from_numpy(_laid(extent, widths)).to(device)
            found = extent.memo[key] = cls(rows, NUMBERS + widths[0], stored, opened)
        return found


class MovingPlace(Place):
    """A place that goes on from token to token, and stays where it lies in memory."""

    def __init__(self, extent: Extent, device: torch.device) -> None:
        """With room for the capacity, or twice the tokens that there are."""
        kind = extent.kind
        tokens = kind.capacity or 2 * int(extent.rows.max(initial=0)) + kind.page
        pages = -(-tokens // kind.page)
        self.kind, self.tokens = kind, tokens
        self.room = (pages if kind.seals else 0, pages)
        with lasting():
            rows = torch.zeros(
                extent.batch, NUMBERS + sum(self.room), dtype=torch.int64, device=device
            )
        super().__init__(rows, NUMBERS + self.room[0], *_most(kind, tokens))
        assert self.follow(extent)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, [B]: whoever steps counts them up."""
        return self.rows[:, LENGTH]

    @property
    def columns(self) -> Tensor:
        """Tokens of the longest sequence, its padding included."""
        return (self.rows[:, LENGTH] + self.rows[:, PADDING]).amax()

    def follow(self, extent: Extent) -> bool:
        """Be where these sequences are; False where they are others, or there is no room."""
        widths = _widths(extent)
        same = extent.batch == len(self.rows) and extent.kind == self.kind
        if not same or widths[0] > self.room[0] or widths[1] > self.room[1]:
            return False
        self.rows.copy_(torch.from_numpy(_laid(extent, self.room)))
        return True


def _widths(extent: Extent) -> tuple[int, int]:
    """How many pages the tables say something of: one open page at least, whatever it is."""
    sealed = int(extent.stop_sealed.max(initial=0)) if extent.kind.seals else 0
    return sealed, int(extent.stop_open.max(initial=1))


def _laid(extent: Extent, widths: tuple[int, int]) -> Ints:
    flat = np.zeros((extent.batch, NUMBERS + sum(widths)), np.int64)
    flat[:, : NUMBERS - 1] = extent.numbers
    flat[:, NUMBERS - 1] = extent.lengths + extent.calm
    place = NUMBERS
    for table, width in zip((extent.sealed, extent.open), widths, strict=True):
        there = min(width, table.shape[1])
        flat[:, place : place + there] = table[:, :there]
        place += width
    return flat


def _most(kind: Kind, tokens: int) -> tuple[int, int]:
    """About how many sealed rows and open ones a sequence has, once it has so many tokens."""
    kept = tokens if kind.window is None else min(tokens, kind.window + kind.slack + kind.page)
    if kind.paging.tail is None:
        return 0, kept
    late = max(kind.paging.tail + kind.page, kind.paging.dense_until)
    return kept, min(kept, late + kind.slack)
