"""Dense copies of rows, for readers other than attention.

The newest token of each sequence is in the last column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvant.attention.length_groups import group_by_length, read_visible_rows
from kvant.contracts import Fields, View
from kvant.page_table import Bools, PageTable


@dataclass(frozen=True)
class ReadableRows:
    """The rows that `read()` returns: sinks, then columns [first_column, length).

    Sinks are positions 0 to `num_sinks` - 1 of each sequence. The columns of a shorter
    sequence may repeat these positions. Column 0 is where the sequence with the most columns
    begins, left padding included.
    """

    page_table: PageTable
    num_sinks: int
    first_column: int

    @classmethod
    def from_page_table(cls, page_table: PageTable) -> ReadableRows:
        """Find the sinks, and the columns in the window that at least one sequence still stores."""
        group, length = page_table.layer_group, page_table.num_columns
        start_columns = length - page_table.lengths
        first_token = int(start_columns.min(initial=length))  # the first column with a token
        window = length if group.window is None else group.window
        first_stored = int((page_table.first_row + start_columns).min(initial=length))
        first_column = max(0, length - window, first_stored if first_stored > first_token else 0)
        if first_column <= first_token:  # the columns reach back to the sinks
            return cls(page_table, 0, min(first_column, length))
        sinks = min(group.sinks, length - first_token)
        return cls(page_table, sinks, min(max(first_column, first_token + sinks), length))

    def __len__(self) -> int:
        return self.num_sinks + self.page_table.num_columns - self.first_column

    def compute_positions(self) -> Tensor:
        """Return the position of every row, [B, n]; -1: padding, pruned, or a repeated sink.

        The shape is [B, H, n] if rows were pruned, because heads retain different rows.
        """
        page_table = self.page_table
        body = (
            np.arange(self.first_column, page_table.num_columns)
            + (page_table.lengths - page_table.num_columns)[:, None]
        )
        body = np.where(
            (body >= self.num_sinks) & (body >= page_table.pruned_before[:, None]), body, -1
        )
        sinks = np.broadcast_to(np.arange(self.num_sinks), (page_table.num_tables, self.num_sinks))
        sinks = np.where(sinks < page_table.seq_lens[:, None], sinks, -1)
        positions = np.concatenate([sinks, body], 1)
        if not page_table.pruned_at.any():
            return torch.from_numpy(page_table.reduce_to_sequences(positions))
        return torch.from_numpy(positions).view(
            page_table.batch, page_table.tables_per_sequence, -1
        )

    def read_all(self, view: View) -> Fields:
        """Return all rows in the codec's frame: rotated or scaled, as they are stored."""
        return _read_sides(view, self.num_sinks, self.first_column, self.page_table.num_columns)

    def read_range(self, view: View, start: int, stop: int | None) -> Fields:
        """Return columns [start, stop) in the codec's frame; raise if rows are missing."""
        length = self.page_table.num_columns
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise ValueError(f"rows [{start}, {stop}) of {length}")
        if start >= self.first_column:
            return _read_sides(view, 0, start, stop)
        if stop <= self.page_table.layer_group.sinks and not self.page_table.padding.any():
            return _read_sides(view, 0, start, stop)
        raise ValueError(f"rows [{start}, {stop}): the layer holds [{self.first_column}, {length})")


def read_columns(view: View, name: Any, start: int, stop: int, num_sinks: int = 0) -> Tensor:
    """Return the rows of one side that the newest query sees, in the codec's frame.

    These are the first `num_sinks` positions of each sequence, then columns [start, stop).
    """
    stored = view.keys if name == "keys" else view.values
    heads, dim = stored.heads, stored.dim
    out = stored.open.new_zeros(view.page_table.num_tables, heads, num_sinks + stop - start, dim)
    for group in group_by_length(view) if view.batch else []:
        first_column = view.page_table.num_columns - group.length
        rows = read_visible_rows(group, name, start - first_column, stop - first_column)
        if num_sinks:
            rows = torch.cat([read_visible_rows(group, name, 0, num_sinks), rows], 2)
        if group.indices is None:
            out = rows
        else:
            out[torch.from_numpy(group.indices).to(out.device)] = rows
    return (
        out
        if view.page_table.tables_per_sequence == 1
        else out.view(view.batch, view.heads, -1, dim)
    )


def mask_present_rows(page_table: PageTable) -> Bools:
    """Return a mask [tables, columns] of the rows that are present."""
    position = (
        np.arange(page_table.num_columns) - (page_table.num_columns - page_table.lengths)[:, None]
    )
    present: Bools = (position >= 0) & (position >= page_table.pruned_before[:, None])
    return present


def _read_sides(view: View, num_sinks: int, start: int, stop: int) -> dict[str, Tensor]:
    names = ["keys"] if view.values is view.keys else ["keys", "values"]
    return {name: read_columns(view, name, start, stop, num_sinks) for name in names}
