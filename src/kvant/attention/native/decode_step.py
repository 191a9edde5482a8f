"""One token after the other in memory that stays where it is, so that requests stay what they are.

Where sequences are, and where their pages lie, are records that are written to between two tokens.
So what a layer asked for one token is asked for the next one by the same bytes. As of the steps
that a CUDA graph holds (triton/step.py), a cache is asked to `expect` a token, and told when it has
arrived.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvant.attention.native import NativeBackend, structs
from kvant.contracts import AttentionRequest, Mask, PagedTensors, View
from kvant.errors import UnsupportedView
from kvant.page_table import LENGTH, PADDING, AppendPlan, Ints, PageTable

WRITE_ROW = 2  # of a write
BACKEND = NativeBackend()


class StaticNativePageTable:
    """The integers of a kind, where the row of the next token goes, and what it lets fall due."""

    def __init__(self, plan: AppendPlan, device: torch.device) -> None:
        page_table = plan.read_table
        kind = page_table.layer_group
        self.capacity = kind.capacity or 2 * int(page_table.seq_lens.max(initial=0)) + kind.page
        numbers = np.zeros_like(page_table.numbers)
        self._record = np.zeros(structs.PAGE_TABLE_STRUCT.size // 8, np.int64)
        self._plan_record = np.zeros(structs.PLAN_STRUCT.size // 8, np.int64)
        self.page_table = PageTable(
            kind,
            numbers,
            page_table.sealed_table,
            page_table.open_table,
            page_table.tables_per_sequence,
        )
        self.page_table.derived[structs.MEMO_KEY] = structs.get_pointer(self._record), self._record
        self.plan = AppendPlan(self.page_table, self.page_table, self.page_table, 1)
        self.plan.derived[structs.MEMO_KEY] = (
            structs.get_pointer(self._plan_record),
            self._plan_record,
        )
        self.lengths: Tensor = torch.from_numpy(numbers)[:, LENGTH]
        self._padding = torch.from_numpy(numbers)[:, PADDING]
        self._writes: Ints
        self._keepalive: tuple[Ints, ...]  # what the records lead to, beside these
        followed = self.update(plan)
        assert followed

    @property
    def columns(self) -> Tensor:
        """Tokens of the longest sequence, its padding included."""
        return (self.lengths + self._padding).amax()

    def advance(self) -> None:
        """One more token of each, which changes nothing else."""
        self.page_table.numbers[:, LENGTH] += 1
        self._writes[:, WRITE_ROW] += 1
        self._plan_record[[structs.NUM_COPIES_INDEX, structs.NUM_SEALS_INDEX]] = 0

    def update(self, plan: AppendPlan) -> bool:
        """Be where these sequences are, their next row included; False: they are others."""
        extent, numbers = plan.read_table, self.page_table.numbers
        if extent.num_tables != len(numbers) or extent.layer_group != self.page_table.layer_group:
            return False
        assert len(plan.writes) == np.count_nonzero(extent.lengths > 0), "rows that go nowhere"
        numbers[:] = extent.numbers
        self._record[:] = structs.get_page_table_record(extent)
        self._record[structs.NUMBERS_POINTER] = structs.get_pointer(numbers)
        self._writes = plan.writes.copy()
        copies, seals = (np.ascontiguousarray(part) for part in (plan.copies, plan.seals))
        self._plan_record[:] = structs.make_plan_record(copies, self._writes, seals)
        self._keepalive = extent.sealed_table, extent.open_table, copies, seals
        return True


@dataclass(eq=False)
class NativeDecodeStep:
    """Appends the rows of a token of every sequence to a layer and attends over all of them."""

    view: View  # over records that stay where they are
    page_table: StaticNativePageTable
    mask: Mask
    source_view: View  # which those lead to
    backend: str = BACKEND.name

    @classmethod
    def from_view(cls, view: View, page_table: StaticNativePageTable) -> NativeDecodeStep:
        """From what a layer shows of a token that is expected."""
        if (reason := BACKEND.supports(view)) is not None:
            raise UnsupportedView(f"no steps behind this view: {reason}")
        if view.selection is not None:
            raise UnsupportedView("no steps behind this view: each token selects pages")
        sides = _detach_memory(view.keys, "keys"), _detach_memory(view.values, "values")
        standing = view._replace(keys=sides[0], values=sides[1], page_table=page_table.page_table)
        return cls(standing, page_table, view.mask, view)

    def rebind(self, view: View) -> bool:
        """Go on from a later view of the same layer; False where its rows are of another kind."""
        here, there = self.view, view
        if (here.mask, here.page_table.layer_group) != (there.mask, there.page_table.layer_group):
            return False
        sides = (here.keys, there.keys, "keys"), (here.values, there.values, "values")
        if not all(_rebind_record(*side) for side in sides):
            return False
        self.source_view = view
        return True

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Outputs [B, heads, 1, Dv], as `append` and then `attend` give them."""
        pages = self.view
        of_keys, of_values = pages.keys.codec.frame, pages.values.codec.frame
        rows = {"keys": of_keys.transform_rows(keys), "values": of_values.transform_rows(values)}
        sides = {"keys": pages.keys, "values": pages.values}
        if not BACKEND.store(self.page_table.plan, rows, sides):
            raise UnsupportedView(
                f"rows {list(keys.shape)} of {keys.dtype} are not stored natively"
            )
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        dtype = q.dtype if of_values.is_identity else torch.float32
        asked = AttentionRequest(
            of_keys.transform_queries(q),
            scale,
            self.mask,
            softcap,
            sink_logits,
            return_lse=False,
            output_dtype=dtype,
        )
        if (reason := BACKEND.supports(pages, asked)) is not None:
            raise UnsupportedView(reason)
        out = BACKEND.attend(asked, pages)[0]
        return of_values.restore_outputs(out).to(q.dtype)


def _detach_memory(tensors: PagedTensors, name: str) -> PagedTensors:
    """What is known of a side, without its memory, behind a record that may be written to."""
    side = structs.get_side(tensors, name)
    assert side.record is not None
    record = side.record.copy()
    held = side._replace(record_pointer=structs.get_pointer(record), record=record)
    opened = tensors.open.new_empty(0, *tensors.open.shape[1:])
    memo = {(structs.MEMO_KEY, name): held}
    return replace(tensors, open=opened, sealed={}, summary=None, derived=memo)


def _rebind_record(current: PagedTensors, new: PagedTensors, name: str) -> bool:
    """Let the record of a side say where it is now, if nothing else changed."""
    own, now = (structs.get_side(side, name) for side in (current, new))
    if own.record is None or now.record is None:
        return False
    told = "read_refusal", "store_refusal", "heads", "page", "dim", "dtype"
    if current.codec != new.codec or any(getattr(own, x) != getattr(now, x) for x in told):
        return False
    own.record[:] = now.record
    return True
