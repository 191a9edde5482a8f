"""Rows on their way into pages: one kernel copies them, another seals to the codec's bytes."""

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
from kvant.page_table import AppendPlan, Ints
from kvant.torch_modes import no_inference_mode
from kvant.triton_runtime import use_device

ROWS_PER_PROGRAM = 16  # a program


def is_unsupported_plan(plan: AppendPlan, rows: Fields, sides: Mapping[str, PagedTensors]) -> bool:
    """Is this left to others? Rows that are sealed, and those that are only copied."""
    for name, side in sides.items():
        came = rows[name]
        if type(side.open) is not Tensor or type(came) not in (Tensor, torch.nn.Parameter):
            return True
        if came.dtype != side.open.dtype or came.dtype not in DTYPES:
            return True
    return len(plan.seals) > 0 and any(_is_unsupported_seal(side) for side in sides.values())


def _is_unsupported_seal(tensors: PagedTensors) -> bool:
    """Sums in an order of halves must divide into them."""
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
    """What a change does to every layer, on the device: as kernels/store.py has it."""

    writes: Tensor  # [n, 6]: copies of pages that are begun, and rows that came
    max_rows: int  # rows of one of them
    seals: Tensor  # [n, 6]

    @classmethod
    def from_plan(cls, plan: AppendPlan, page: int, device: torch.device) -> DevicePlan:
        key = ("entries", device)
        found: DevicePlan | None = plan.derived.get(key)
        if found is None:
            writes, seals = _make_write_entries(plan, page), _make_seal_entries(plan, page)
            both = torch.from_numpy(np.concatenate([writes, seals])).to(device)
            most = int(writes[:, 2].max(initial=0))
            found = cls(both[: len(writes)], most, both[len(writes) :])
            plan.derived[key] = found
        return found


def _make_write_entries(plan: AppendPlan, page: int) -> Ints:
    copies, writes = plan.copies, plan.writes
    found = np.zeros((len(copies) + len(writes), 6), np.int64)
    found[: len(copies), 0], found[: len(copies), 3] = copies[:, 1], copies[:, 0]
    # Of a page that is copied as rows are added to it, the rows before those: all at a time.
    found[: len(copies), 2] = page
    to, at = np.nonzero(copies[:, 1:] == writes[:, 1])
    found[to, 2] = writes[at, 2]
    added = found[len(copies) :]
    added[:, :3], added[:, 3], added[:, 4:] = writes[:, 1:4], -1, writes[:, [0, 4]]
    return found


def _make_seal_entries(plan: AppendPlan, page: int) -> Ints:
    found = np.zeros((len(plan.seals), 6), np.int64)
    found[:, 0], found[:, 2], found[:, 3] = plan.seals[:, 1], page, plan.seals[:, 2]
    found[:, 4:] = plan.seals[:, [0, 3]]
    return found


def launch_store(plan: AppendPlan, new_rows: Fields, sides: Mapping[str, PagedTensors]) -> None:
    """Copy and write the rows of all sides in one launch, and seal each in one."""
    first = next(iter(sides.values())).open
    entries = DevicePlan.from_plan(plan, first.shape[2], first.device)
    new_rows = {name: align_rows(new_rows[name]) for name in sides}
    with use_device(first.device):
        ways = tuple(
            make_copy_args(side.open, side.open, new_rows[name]) for name, side in sides.items()
        )
        _launch_copy(ways, entries.writes, entries.max_rows)
        if len(entries.seals):
            for name, side in sides.items():
                _launch_seal(side, new_rows[name], entries.seals)


def make_copy_args(target: Tensor, open_pages: Tensor, new_rows: Tensor) -> Any:
    """From open pages, or from where rows came, into pages."""
    dim = target.shape[3]
    fixed = dim, next_power_of_2(dim), is_aligned(open_pages) and is_aligned(new_rows)
    return import_kernel_records().CopyArgs(
        make_dense_rows(target),
        make_dense_rows(open_pages),
        make_dense_rows(new_rows),
        *map(make_constexpr, fixed),
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
    kinds = make_side_constants(form, dim, tensors.open.dtype, tensors.open.is_cpu)[0]
    numbers = make_sealed_fields(TritonSide(form, tensors.open, tensors.sealed))
    cuts = tensors.sealed["scale"]
    if form.kind == "codebook":
        numbers = numbers._replace(
            levels=make_level_table(form.bits, dim, torch.float32, new_rows.device)
        )
        cuts = _make_boundary_table(form.bits, dim, new_rows.device)
    store.seal[len(entries) * heads, page // ROWS_PER_PROGRAM](
        make_copy_args(tensors.open, tensors.open, new_rows),
        entries,
        numbers,
        cuts,
        kinds,
        make_third_bit_layout(dim) if form.kind == "codebook" and form.bits == 3 else kinds,
        HEADS=heads,
        PAGE=page,
        DIM=dim,
        CORRECTED=form.corrected,
        ROWS=ROWS_PER_PROGRAM,
        enable_fp_fusion=False,  # which rounds otherwise than the codecs do
    )


@lru_cache(maxsize=64)
def _make_boundary_table(bits: int, dim: int, device: torch.device) -> Tensor:
    with no_inference_mode():
        return torch.tensor(compute_boundaries(bits, dim).astype(np.float32), device=device)
