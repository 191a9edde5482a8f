"""Decode steps on the CPU whose native requests keep the same bytes from token to token.

Page tables and append plans are records at fixed addresses, updated in place between tokens. So a
layer's requests for one token can be replayed unchanged for the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvant.attention.native import NativeBackend, structs
from kvant.contracts import AttentionRequest, PagedTensors, View
from kvant.derived import Derived
from kvant.errors import UnsupportedView
from kvant.native.header import PAGE_TABLE_STRUCT, PLAN_STRUCT
from kvant.page_table import LENGTH, PADDING, WRITE_ROW, AppendPlan, Ints, PageTable
from kvant.replay.steps import DecodeStep, check_step_view

BACKEND = NativeBackend()


class StaticNativePageTable:
    """A layer group's page table and append plan for the next token, at fixed addresses."""

    def __init__(self, plan: AppendPlan, device: torch.device) -> None:
        page_table = plan.read_table
        group = page_table.layer_group
        self.capacity = group.capacity or 2 * int(page_table.seq_lens.max(initial=0)) + group.page
        numbers = np.zeros_like(page_table.numbers)
        self._record = np.array(PAGE_TABLE_STRUCT.null, np.int64)
        self._plan_record = np.array(PLAN_STRUCT.null, np.int64)
        self.page_table = PageTable(
            group,
            numbers,
            page_table.sealed_table,
            page_table.open_table,
            page_table.tables_per_sequence,
        )
        self.page_table.derived[structs.TABLE_RECORD] = structs.PointedRecord(
            structs.get_pointer(self._record), self._record
        )
        self.plan = AppendPlan(self.page_table, self.page_table, self.page_table, 1)
        self.plan.derived[structs.PLAN_RECORD] = structs.PointedRecord(
            structs.get_pointer(self._plan_record), self._plan_record
        )
        self.lengths: Tensor = torch.from_numpy(numbers)[:, LENGTH]
        self._padding = torch.from_numpy(numbers)[:, PADDING]
        self._writes: Ints
        self._keepalive: tuple[Ints, ...]  # other memory that the records point to
        updated = self.update(plan)
        assert updated

    @property
    def columns(self) -> Tensor:
        """Tokens of the longest sequence, its padding included."""
        return (self.lengths + self._padding).amax()

    def advance(self) -> None:
        """Advance every sequence by one token that needs no new page and seals none."""
        self.page_table.numbers[:, LENGTH] += 1
        self._writes[:, WRITE_ROW] += 1
        self._plan_record[structs.COPY_AND_SEAL_COUNTS] = 0

    def update(self, plan: AppendPlan) -> bool:
        """Copy the plan's page table and writes; return False if its sequences are others."""
        source, numbers = plan.read_table, self.page_table.numbers
        if source.num_tables != len(numbers) or source.layer_group != self.page_table.layer_group:
            return False
        num_nonempty = np.count_nonzero(source.lengths > 0)
        assert len(plan.writes) == num_nonempty, "every sequence with tokens writes one row"
        numbers[:] = source.numbers
        self._record[:] = structs.get_page_table_record(source)
        self._record[structs.NUMBERS_POINTER] = structs.get_pointer(numbers)
        self._writes = plan.writes.copy()
        copies, seals = (np.ascontiguousarray(part) for part in (plan.copies, plan.seals))
        self._plan_record[:] = structs.make_plan_record(copies, self._writes, seals)
        self._keepalive = source.sealed_table, source.open_table, copies, seals
        return True


@dataclass(eq=False)
class NativeDecodeStep(DecodeStep):
    """The decode step of a layer on a CPU."""

    page_table: StaticNativePageTable
    source_view: View  # keeps the memory that the records of `view` point to

    @classmethod
    def from_view(cls, view: View, page_table: StaticNativePageTable) -> NativeDecodeStep:
        """Make a step from a layer's view of the expected token."""
        check_step_view(BACKEND, view)
        sides = _detach_memory(view.keys, "keys"), _detach_memory(view.values, "values")
        step_view = view._replace(keys=sides[0], values=sides[1], page_table=page_table.page_table)
        return cls(step_view, page_table, view.mask, BACKEND.name, view)

    def rebind(self, view: View) -> bool:
        """Continue from a later view of the same layer; return False if it differs."""
        old = self.view
        if (old.mask, old.page_table.layer_group) != (view.mask, view.page_table.layer_group):
            return False
        sides = (old.keys, view.keys, "keys"), (old.values, view.values, "values")
        if not all(_rebind_record(*side) for side in sides):
            return False
        self.source_view = view
        return True

    def write_rows(self, keys: Tensor, values: Tensor) -> None:
        sides = {"keys": self.view.keys, "values": self.view.values}
        if not BACKEND.store(self.page_table.plan, {"keys": keys, "values": values}, sides):
            raise UnsupportedView(
                f"the CPU kernels cannot store rows {list(keys.shape)} of {keys.dtype}"
            )

    def attend(self, request: AttentionRequest) -> Tensor:
        if (reason := BACKEND.supports(self.view, request)) is not None:
            raise UnsupportedView(reason)
        return BACKEND.attend(request, self.view)[0]


def _detach_memory(tensors: PagedTensors, name: str) -> PagedTensors:
    """Copy a side without its tensors, with a writable copy of its record."""
    side = structs.get_side(tensors, name)
    assert side.record is not None
    record = side.record.copy()
    detached = side._replace(record_pointer=structs.get_pointer(record), record=record)
    open_pages = tensors.open.new_empty(0, *tensors.open.shape[1:])
    tensors = replace(tensors, open=open_pages, sealed={}, summary=None, derived=Derived())
    tensors.derived[structs.SIDES[name]] = detached
    return tensors


def _rebind_record(current: PagedTensors, new: PagedTensors, name: str) -> bool:
    """Copy the new addresses of a side to its record; return False if anything else changed."""
    old_side, new_side = (structs.get_side(side, name) for side in (current, new))
    if old_side.record is None or new_side.record is None:
        return False
    fields = "read_refusal", "store_refusal", "heads", "page", "dim", "dtype"
    same = all(getattr(old_side, field) == getattr(new_side, field) for field in fields)
    if current.codec != new.codec or not same:
        return False
    old_side.record[:] = new_side.record
    return True
