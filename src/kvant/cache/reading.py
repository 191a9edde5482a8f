"""Dense rows for everybody but attention: copies, side by side at the newest token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvant.attention.reference import Alike, alike, seen_rows
from kvant.contracts import Fields, View
from kvant.extent import Extent


@dataclass(frozen=True)
class Held:
    """What a layer reads as: sinks that stand alone, then columns [first, length).

    A column counts from the first token of the longest sequence, its padding included.
    """

    extent: Extent
    sinks: int
    first: int

    @classmethod
    def of(cls, extent: Extent) -> Held:
        kind, length = extent.kind, extent.columns
        aside = length - extent.lengths
        least = int(aside.min(initial=length))
        window = length if kind.window is None else kind.window
        given = int((extent.first_row + aside).min(initial=length))
        first = max(0, length - window, given if given > least else 0)
        if first <= least:
            return cls(extent, 0, min(first, length))
        sinks = min(kind.sinks, length - least)
        return cls(extent, sinks, min(max(first, least + sinks), length))

    def __len__(self) -> int:
        return self.sinks + self.extent.columns - self.first

    def positions(self) -> Tensor:
        """The position of every row, [B, n]; -1 where it is padding, pruned or a repeat.

        [B, H, n] where rows were pruned: each head has others, which count from the newest back.
        """
        extent = self.extent
        body = np.arange(self.first, extent.columns) + (extent.lengths - extent.columns)[:, None]
        body = np.where((body >= self.sinks) & (body >= extent.missing[:, None]), body, -1)
        alone = np.broadcast_to(np.arange(self.sinks), (extent.tables, self.sinks))
        alone = np.where(alone < extent.rows[:, None], alone, -1)
        found = np.concatenate([alone, body], 1)
        if not extent.pruned.any():
            return torch.from_numpy(extent.of_sequences(found))
        return torch.from_numpy(found).view(extent.batch, extent.heads, -1)

    def read(self, pages: View) -> Fields:
        """All of them, framed."""
        return _sides(pages, self.sinks, self.first, self.extent.columns)

    def between(self, pages: View, start: int, stop: int | None) -> Fields:
        """Framed rows of columns [start, stop), or an error that says what is held."""
        length = self.extent.columns
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise ValueError(f"rows [{start}, {stop}) of {length}")
        if start >= self.first:
            return _sides(pages, 0, start, stop)
        if stop <= self.extent.kind.sinks and not self.extent.padding.any():
            return _sides(pages, 0, start, stop)
        raise ValueError(f"rows [{start}, {stop}): the layer holds [{self.first}, {length})")


def columns(pages: View, name: Any, start: int, stop: int) -> Tensor:
    """Framed rows of columns [start, stop) of one side, as the newest query sees them."""
    return _side(pages, name, 0, start, stop)


def _sides(pages: View, sinks: int, start: int, stop: int) -> dict[str, Tensor]:
    names = ["keys"] if pages.values is pages.keys else ["keys", "values"]
    return {name: _side(pages, name, sinks, start, stop) for name in names}


def _side(pages: View, name: Any, sinks: int, start: int, stop: int) -> Tensor:
    stored = pages.keys if name == "keys" else pages.values
    heads, dim = stored.heads, stored.dim
    out = stored.open.new_zeros(pages.extent.tables, heads, sinks + stop - start, dim)
    for group in alike(pages) if pages.batch else []:
        rows = _group(group, name, sinks, start, stop)
        if group.which is None:
            out = rows
        else:
            out[torch.from_numpy(group.which).to(out.device)] = rows
    return out if pages.extent.heads == 1 else out.view(pages.batch, pages.heads, -1, dim)


def _group(group: Alike, name: Any, sinks: int, start: int, stop: int) -> Tensor:
    aside = group.pages.extent.columns - group.length
    rows = seen_rows(group, name, start - aside, stop - aside)
    return torch.cat([seen_rows(group, name, 0, sinks), rows], 2) if sinks else rows
