"""Launch the kernels that store rows: one copies rows to open pages, one seals pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvant.attention.triton.arguments import (
    DTYPES,
    MAX_DIM,
    TritonSide,
    align_rows,
    explain_unsupported_codec,
    get_form,
    import_kernel_records,
    is_aligned,
    make_constexpr,
    make_dense_rows,
    make_level_table,
    make_sealed_fields,
    make_side_constants,
    make_third_bit_layout,
    next_power_of_2,
)
from kvant.codecs.codebook import compute_boundaries
from kvant.contracts import Fields, PagedTensors
from kvant.lazy import Memo
from kvant.page_table import (
    SEAL_COLUMN,
    SEAL_SLOT,
    SEAL_SOURCE,
    SEAL_TABLE,
    WRITE_COLUMN,
    WRITE_COUNT,
    WRITE_ROW,
    WRITE_SLOT,
    WRITE_TABLE,
    AppendPlan,
    Ints,
)
from kvant.platform.torch_runtime import no_inference_mode, use_device

ROWS_PER_PROGRAM = 16
NUM_ROWS_COLUMN = 2  # of `StoreEntry`


def is_unsupported_plan(plan: AppendPlan, rows: Fields, sides: Mapping[str, PagedTensors]) -> bool:
    """Tell whether the kernels cannot store these rows, or cannot seal pages of the plan."""
    for name, side in sides.items():
        new_rows = rows[name]
        if type(side.open) is not Tensor or type(new_rows) not in (Tensor, torch.nn.Parameter):
            return True
        if new_rows.dtype != side.open.dtype or new_rows.dtype not in DTYPES:
            return True
    return len(plan.seals) > 0 and any(_is_unsupported_seal(side) for side in sides.values())


def _is_unsupported_seal(tensors: PagedTensors) -> bool:
    """Tell whether the kernels cannot seal pages of this side.

    Sums over a row halve it repeatedly, so a codebook row must be a power of two wide.
    """
    page, dim = tensors.open.shape[2:]
    if (
        explain_unsupported_codec(tensors.codec) is not None
        or tensors.tiles is not None
        or page % ROWS_PER_PROGRAM
    ):
        return True
    uneven = get_form(tensors.codec).kind == "codebook" and dim & (dim - 1)
    return dim % 16 != 0 or dim > MAX_DIM or bool(uneven)


@dataclass(frozen=True)
class DevicePlan:
    """The entries of an append plan on the device, as rows of `StoreEntry`."""

    writes: Tensor  # [n, 6]: copies of open pages, and writes of new rows
    max_rows: int  # largest number of rows of a write entry
    seals: Tensor  # [n, 6]

    @classmethod
    def from_plan(cls, plan: AppendPlan, page: int, device: torch.device) -> DevicePlan:
        """Copy a plan's entries to the device, once for all layers that share the plan."""
        device_plans = plan.derived.setdefault(DEVICE_PLANS, {})
        device_plan = device_plans.get(device)
        if device_plan is None:
            writes, seals = _make_write_entries(plan, page), _make_seal_entries(plan, page)
            entries = torch.from_numpy(np.concatenate([writes, seals])).to(device)
            max_rows = int(writes[:, NUM_ROWS_COLUMN].max(initial=0))
            device_plan = cls(entries[: len(writes)], max_rows, entries[len(writes) :])
            device_plans[device] = device_plan
        return device_plan


DEVICE_PLANS: Memo[dict[torch.device, DevicePlan]] = Memo("plans on devices")


def _make_write_entries(plan: AppendPlan, page: int) -> Ints:
    (sources, slots), writes = plan.copies.T, plan.writes
    # One launch copies and writes in any order, so a copy ends before the first new row.
    copied_rows = np.full(len(slots), page)
    copy, write = np.nonzero(slots[:, None] == writes[:, WRITE_SLOT])
    copied_rows[copy] = writes[write, WRITE_ROW]
    columns = (WRITE_SLOT, WRITE_ROW, WRITE_COUNT, WRITE_TABLE, WRITE_COLUMN)
    slot, row, count, table, column = writes[:, columns].T
    copied = _stack_entries(slots, 0, copied_rows, sources, 0, 0)
    return np.concatenate([copied, _stack_entries(slot, row, count, -1, table, column)])


def _make_seal_entries(plan: AppendPlan, page: int) -> Ints:
    columns = (SEAL_SLOT, SEAL_SOURCE, SEAL_TABLE, SEAL_COLUMN)
    slot, source, table, column = plan.seals[:, columns].T
    return _stack_entries(slot, 0, page, source, table, column)


def _stack_entries(*columns: Ints | int) -> Ints:
    """Return entries, [n, 6], from their columns in the order of `StoreEntry`."""
    return np.stack(np.broadcast_arrays(*columns), 1)


def launch_store(plan: AppendPlan, new_rows: Fields, sides: Mapping[str, PagedTensors]) -> None:
    """Copy pages and write rows of all sides in one launch, then seal each side in one."""
    first = next(iter(sides.values())).open
    entries = DevicePlan.from_plan(plan, first.shape[2], first.device)
    new_rows = {name: align_rows(new_rows[name]) for name in sides}
    with use_device(first.device):
        copies = tuple(
            make_copy_args(side.open, side.open, new_rows[name]) for name, side in sides.items()
        )
        _launch_copy(copies, entries.writes, entries.max_rows)
        if len(entries.seals):
            for name, side in sides.items():
                _launch_seal(side, new_rows[name], entries.seals)


def make_copy_args(target: Tensor, open_pages: Tensor, new_rows: Tensor) -> Any:
    """Return the arguments of a copy into `target` from open pages, or from new rows."""
    dim = target.shape[3]
    constants = dim, next_power_of_2(dim), is_aligned(open_pages) and is_aligned(new_rows)
    return import_kernel_records().CopyArgs(
        make_dense_rows(target),
        make_dense_rows(open_pages),
        make_dense_rows(new_rows),
        *map(make_constexpr, constants),
    )


def _launch_copy(copies: tuple[Any, ...], entries: Tensor, max_rows: int) -> None:
    from kvant.attention.triton.kernels import store

    if len(entries) == 0:
        return
    heads = copies[0].target.data.shape[1]
    block = min(next_power_of_2(max_rows), ROWS_PER_PROGRAM)
    store.put[len(entries) * heads, -(-max_rows // block)](copies, entries, HEADS=heads, ROWS=block)


def _launch_seal(tensors: PagedTensors, new_rows: Tensor, entries: Tensor) -> None:
    from kvant.attention.triton.kernels import store

    form, (heads, page, dim) = get_form(tensors.codec), tensors.open.shape[1:]
    if form.kind == "raw":
        _launch_copy(
            (make_copy_args(tensors.sealed["rows"], tensors.open, new_rows),), entries, page
        )
        return
    layout = make_side_constants(form, dim, tensors.open.dtype, tensors.open.is_cpu)[0]
    fields = make_sealed_fields(TritonSide(form, tensors.open, tensors.sealed))
    boundaries = tensors.sealed["scale"]  # not read by affine codecs
    if form.kind == "codebook":
        fields = fields._replace(
            levels=make_level_table(form.bits, dim, torch.float32, new_rows.device)
        )
        boundaries = _make_boundary_table(form.bits, dim, new_rows.device)
    args = import_kernel_records().SealArgs(
        fields,
        boundaries,
        layout,
        make_third_bit_layout(dim) if form.kind == "codebook" and form.bits == 3 else layout,
        *map(make_constexpr, (page, dim, form.corrected, ROWS_PER_PROGRAM)),
    )
    store.seal[len(entries) * heads, page // ROWS_PER_PROGRAM](
        make_copy_args(tensors.open, tensors.open, new_rows),
        entries,
        args,
        HEADS=heads,
        enable_fp_fusion=False,  # fused operations would round differently from the codecs
    )


@lru_cache(maxsize=64)
def _make_boundary_table(bits: int, dim: int, device: torch.device) -> Tensor:
    with no_inference_mode():
        return torch.tensor(compute_boundaries(bits, dim).astype(np.float32), device=device)
