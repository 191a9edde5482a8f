"""Decode steps: one layer's work on new tokens, at fixed addresses, so it can be replayed.

The cache does not see the rows that steps write: the caller plans the tokens of each forward, and
commits them after (cache/tokens.py). A page table is updated in place between forwards. On the CPU,
so are the records of a page table and its append plan: a layer's requests for one forward can be
replayed unchanged for the next one. On the GPU a step is two operators in a CUDA graph.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvant.attention.native import NativeBackend, structs
from kvant.attention.triton import TritonBackend
from kvant.attention.triton.arguments import StaticTritonPageTable
from kvant.attention.triton.token_operators import attend_token, write_token
from kvant.contracts import AttentionRequest, Backend, Mask, PagedTensors, View
from kvant.errors import UnsupportedView
from kvant.lazy import Derived
from kvant.native import DTYPE_CODES
from kvant.native.header import PAGE_TABLE_STRUCT, PLAN_STRUCT
from kvant.page_table import LENGTH, PADDING, WRITE_COUNT, WRITE_ROW, AppendPlan, Ints, PageTable


class StaticPageTable(Protocol):
    """The page table of a layer group for the next forward, updated in place.

    It has no left padding, which is not stored: a padded batch is one of different lengths.
    """

    capacity: int  # columns that it has room for
    num_new: int  # tokens of each sequence in a forward

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, [B]."""

    @property
    def columns(self) -> Tensor:
        """Tokens of the longest sequence."""

    def advance(self) -> None:
        """Advance every sequence by one token that needs no new page and seals none.

        Only for forwards of one token.
        """

    def update(self, plan: AppendPlan) -> bool:
        """Copy the plan's page table; return False for other sequences, or if it does not fit."""


@dataclass(eq=False)
class DecodeStep:
    """Decode step of one layer: append tokens to every sequence, then attend to all rows.

    `page_table` counts the tokens, those of this step included. The caller advances or updates it
    before every forward.
    """

    view: View  # the layer's storage; lengths and slots are read from `page_table`
    page_table: StaticPageTable
    mask: Mask
    backend: str

    @abstractmethod
    def rebind(self, view: View) -> bool:
        """Continue from a later view of the same layer; return False if it differs."""

    def release_pages(self) -> None:
        """Drop references to pages that a step needs only until its forward is committed."""

    @abstractmethod
    def write_rows(self, keys: Tensor, values: Tensor) -> None:
        """Store the framed rows [B, H, T, D] of the tokens."""

    @abstractmethod
    def attend(self, request: AttentionRequest) -> Tensor:
        """Return attention outputs in the frame of the values."""

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
        """Return outputs [B, heads, T, Dv], equal to those of `append` and then `attend`."""
        self._check_tokens(q, keys, values, sink_logits)
        key_frame, value_frame = self.view.keys.codec.frame, self.view.values.codec.frame
        self.write_rows(key_frame.transform_rows(keys), value_frame.transform_rows(values))
        request = AttentionRequest(
            key_frame.transform_queries(q),
            q.shape[-1] ** -0.5 if scale is None else scale,
            self.mask,
            softcap,
            sink_logits,
            return_lse=False,
            output_dtype=q.dtype if value_frame.is_identity else torch.float32,
        )
        return value_frame.restore_outputs(self.attend(request)).to(q.dtype)

    def _check_tokens(
        self, q: Tensor, keys: Tensor, values: Tensor, sink_logits: Tensor | None
    ) -> None:
        """Raise ValueError unless rows and queries are those of the tokens, and fit the pages."""
        batch, count = len(self.page_table.lengths), self.page_table.num_new
        for name, rows, pages in (
            ("keys", keys, self.view.keys.open),
            ("values", values, self.view.values.open),
        ):
            needed = [batch, pages.shape[1], count, pages.shape[3]]
            same = rows.dtype == pages.dtype and rows.device == pages.device
            if list(rows.shape) != needed or not same:
                raise ValueError(
                    f"{name} {list(rows.shape)} of {rows.dtype} on {rows.device}: this step takes "
                    f"{needed} of {pages.dtype} on {pages.device}"
                )
        heads, dim = keys.shape[1::2]
        fits = q.ndim == 4 and (q.shape[0], *q.shape[2:]) == (batch, count, dim)
        fits = fits and q.shape[1] > 0 and q.shape[1] % heads == 0
        if not fits or q.dtype not in DTYPE_CODES or q.device != keys.device:
            raise ValueError(
                f"queries {list(q.shape)} of {q.dtype} on {q.device}: this step takes "
                f"[{batch}, a multiple of {heads}, {count}, {dim}] of 16 or 32 bits on "
                f"{keys.device}"
            )
        if sink_logits is not None and sink_logits.shape != (q.shape[1],):
            raise ValueError(
                f"sink_logits of shape {list(sink_logits.shape)} for {q.shape[1]} heads: "
                "one per head is needed"
            )


def check_step_view(backend: Backend, view: View) -> None:
    """Raise UnsupportedView for a view that this backend has no decode steps for."""
    reason = backend.supports(view)
    if reason is None and view.selection is not None:
        reason = "each token selects pages"
    if reason is not None:
        raise UnsupportedView(f"no decode steps for this view: {reason}")


BACKEND = NativeBackend()


class StaticNativePageTable:
    """A layer group's page table and append plan for the next forward, at fixed addresses."""

    def __init__(self, plan: AppendPlan, device: torch.device) -> None:
        page_table = plan.read_table
        group = page_table.layer_group
        self.num_new = plan.num_new
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
        self.plan = AppendPlan(self.page_table, self.page_table, self.page_table, self.num_new)
        self.plan.derived[structs.PLAN_RECORD] = structs.PointedRecord(
            structs.get_pointer(self._plan_record), self._plan_record
        )
        self.lengths: Tensor = torch.from_numpy(numbers)[:, LENGTH]
        self._writes: Ints
        self._keepalive: tuple[Ints, ...]  # other memory that the records point to
        updated = self.update(plan)
        assert updated

    @property
    def columns(self) -> Tensor:
        """Tokens of the longest sequence."""
        return self.lengths.amax()

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
        num_written = int(plan.writes[:, WRITE_COUNT].sum())
        expected = int(source.lengths.clip(0, plan.num_new).sum())
        assert num_written == expected, "every sequence writes the rows of its new tokens"
        numbers[:] = source.numbers
        numbers[:, PADDING] = 0
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
    # Keeps the memory that the records of `view` point to, during a forward. Between forwards the
    # cache keeps it, or the next forward binds other pages.
    source_view: View | None

    @classmethod
    def from_view(cls, view: View, page_table: StaticNativePageTable) -> NativeDecodeStep:
        """Make a step from a layer's view of the planned tokens."""
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

    def release_pages(self) -> None:
        self.source_view = None

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


@dataclass(eq=False)
class TritonDecodeStep(DecodeStep):
    """The decode step of a layer on a GPU, or in Triton's interpreter."""

    page_table: StaticTritonPageTable

    @classmethod
    def from_view(cls, view: View, page_table: StaticTritonPageTable) -> TritonDecodeStep:
        """Make a step from a layer's view of the expected token."""
        device = view.keys.open.device.type
        backend = TritonBackend("interpreted" if device == "cpu" else "triton", device)
        check_step_view(backend, view)
        view = view._replace(page_table=view.page_table.without_padding())
        return cls(view, page_table, view.mask, backend.name)

    def rebind(self, view: View) -> bool:
        """Tell whether a later view of the same layer has the same storage addresses."""
        return _get_memory_key(view) == _get_memory_key(self.view)

    def write_rows(self, keys: Tensor, values: Tensor) -> None:
        write_token(self.view, self.page_table, keys, values)

    def attend(self, request: AttentionRequest) -> Tensor:
        return attend_token(self.view, self.page_table, request)


def _get_memory_key(view: View) -> tuple[object, ...]:
    """Return what a captured launch depends on besides the page table: addresses and settings."""
    sides = view.keys, view.values
    tensors = [tensor for side in sides for tensor in (side.open, *side.sealed.values())]
    storage = tuple((tensor.data_ptr(), tensor.shape) for tensor in tensors)
    return storage, view.keys.codec, view.values.codec, view.mask, view.page_table.layer_group
