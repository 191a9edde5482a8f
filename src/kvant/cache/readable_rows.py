"""Dense rows for everybody but attention: copies, side by side at the newest token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvant.attention.reference import LengthGroup, group_by_length, read_visible_rows
from kvant.contracts import Fields, View
from kvant.page_table import PageTable


@dataclass(frozen=True)
class ReadableRows:
    """What a layer reads as: sinks that stand alone, then columns [first, length).

    A column counts from the first token of the longest sequence, its padding included.
    """

    page_table: PageTable
    num_sinks: int
    first_column: int

    @classmethod
    def from_page_table(cls, page_table: PageTable) -> ReadableRows:
        kind, length = page_table.layer_group, page_table.num_columns
        aside = length - page_table.lengths
        least = int(aside.min(initial=length))
        window = length if kind.window is None else kind.window
        given = int((page_table.first_row + aside).min(initial=length))
        first = max(0, length - window, given if given > least else 0)
        if first <= least:
            return cls(page_table, 0, min(first, length))
        sinks = min(kind.sinks, length - least)
        return cls(page_table, sinks, min(max(first, least + sinks), length))

    def __len__(self) -> int:
        return self.num_sinks + self.page_table.num_columns - self.first_column

    def compute_positions(self) -> Tensor:
        """The position of every row, [B, n]; -1 where it is padding, pruned or a repeat.

        [B, H, n] where rows were pruned: each head has others, which count from the newest back.
        """
        extent = self.page_table
        body = (
            np.arange(self.first_column, extent.num_columns)
            + (extent.lengths - extent.num_columns)[:, None]
        )
        body = np.where(
            (body >= self.num_sinks) & (body >= extent.pruned_before[:, None]), body, -1
        )
        alone = np.broadcast_to(np.arange(self.num_sinks), (extent.num_tables, self.num_sinks))
        alone = np.where(alone < extent.seq_lens[:, None], alone, -1)
        found = np.concatenate([alone, body], 1)
        if not extent.pruned_at.any():
            return torch.from_numpy(extent.reduce_to_sequences(found))
        return torch.from_numpy(found).view(extent.batch, extent.tables_per_sequence, -1)

    def read_all(self, view: View) -> Fields:
        """All of them, framed."""
        return _read_sides(view, self.num_sinks, self.first_column, self.page_table.num_columns)

    def read_range(self, view: View, start: int, stop: int | None) -> Fields:
        """Framed rows of columns [start, stop), or an error that says what is held."""
        length = self.page_table.num_columns
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise ValueError(f"rows [{start}, {stop}) of {length}")
        if start >= self.first_column:
            return _read_sides(view, 0, start, stop)
        if stop <= self.page_table.layer_group.sinks and not self.page_table.padding.any():
            return _read_sides(view, 0, start, stop)
        raise ValueError(f"rows [{start}, {stop}): the layer holds [{self.first_column}, {length})")


def read_columns(view: View, name: Any, start: int, stop: int) -> Tensor:
    """Framed rows of columns [start, stop) of one side, as the newest query sees them."""
    return _read_side(view, name, 0, start, stop)


def _read_sides(view: View, num_sinks: int, start: int, stop: int) -> dict[str, Tensor]:
    names = ["keys"] if view.values is view.keys else ["keys", "values"]
    return {name: _read_side(view, name, num_sinks, start, stop) for name in names}


def _read_side(view: View, name: Any, num_sinks: int, start: int, stop: int) -> Tensor:
    stored = view.keys if name == "keys" else view.values
    heads, dim = stored.heads, stored.dim
    out = stored.open.new_zeros(view.page_table.num_tables, heads, num_sinks + stop - start, dim)
    for group in group_by_length(view) if view.batch else []:
        rows = _read_group(group, name, num_sinks, start, stop)
        if group.indices is None:
            out = rows
        else:
            out[torch.from_numpy(group.indices).to(out.device)] = rows
    return (
        out
        if view.page_table.tables_per_sequence == 1
        else out.view(view.batch, view.heads, -1, dim)
    )


def _read_group(group: LengthGroup, name: Any, num_sinks: int, start: int, stop: int) -> Tensor:
    aside = group.view.page_table.num_columns - group.length
    rows = read_visible_rows(group, name, start - aside, stop - aside)
    return torch.cat([read_visible_rows(group, name, 0, num_sinks), rows], 2) if num_sinks else rows
