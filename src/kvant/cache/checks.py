"""Validation of the arguments of `append` and `plan_tokens`, before anything changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvant.contracts import Fields, Order
from kvant.errors import CapacityError
from kvant.page_table import AppendPlan, PageTable
from kvant.platform.torch_runtime import DTYPES
from kvant.recipes import LayerSpec


def check_order(order: str) -> None:
    if order not in ("BHTD", "BTHD"):
        raise ValueError(f"order {order!r}: 'BHTD' or 'BTHD' is needed")


def prepare_rows(spec: LayerSpec, keys: Tensor, values: Tensor | None, order: Order) -> Fields:
    """Return the tensors of an append as {side: [B, H, T, D]}, or raise ValueError."""
    if (values is None) != (spec.value_dim is not None):
        raise ValueError("values are needed, unless the spec has value_dim: then pass only keys")
    rows = {"keys": keys} if values is None else {"keys": keys, "values": values}
    check_order(order)
    for name, tensor in rows.items():
        _check_tensor(name, tensor, order)
    if spec.value_dim is not None and spec.value_dim > keys.shape[3]:
        raise ValueError(f"values of {spec.value_dim} channels inside keys of {keys.shape[3]}")
    if values is not None and (keys.shape[:3], keys.device) != (values.shape[:3], values.device):
        raise ValueError(
            f"keys {list(keys.shape)} on {keys.device} and values {list(values.shape)} on "
            f"{values.device} differ in more than their last dimension and dtype"
        )
    if order == "BTHD":
        rows = {name: tensor.transpose(1, 2) for name, tensor in rows.items()}
    return {name: _convert_row_dtype(tensor, spec.dtype) for name, tensor in rows.items()}


def _convert_row_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Detach `tensor` and convert it to the dtype of the spec; skip calls without effect."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if dtype in (None, tensor.dtype) else tensor.to(dtype)


def _check_tensor(name: str, tensor: Tensor, order: Order) -> None:
    if tensor.ndim != 4:
        single = f": one sequence is {name}[None]" if tensor.ndim == 3 else ""
        raise ValueError(
            f"{name} of shape {list(tensor.shape)}: {order} needs 4 dimensions{single}"
        )
    heads = tensor.shape[1 if order == "BHTD" else 2]
    if 0 in (tensor.shape[0], heads, tensor.shape[3]):
        raise ValueError(f"{name} of shape {list(tensor.shape)}: only T may be 0")
    if not is_row_dtype(tensor.dtype):
        raise ValueError(f"{name} of {tensor.dtype}: one of {', '.join(DTYPES)} is needed")


def is_row_dtype(dtype: torch.dtype) -> bool:
    return dtype in DTYPES.values()


def parse_padding(start: Sequence[int] | Tensor, batch: int) -> tuple[int, ...]:
    """Return the columns of left padding of each sequence, from the `start` of an append."""
    columns = torch.as_tensor(start)
    if columns.ndim != 1 or columns.is_floating_point() or columns.dtype == torch.bool:
        raise ValueError(f"start {start}: one whole number per sequence is needed")
    padding = tuple(columns.tolist())
    if len(padding) != batch or min(padding, default=0) < 0:
        raise ValueError(
            f"start {padding}: one number >= 0 for each of {batch} sequences is needed"
        )
    return padding


def check_same_forward(plan: AppendPlan, batch: int, count: int, start: Any) -> None:
    """Refuse rows that do not match those of the open forward."""
    old_table = plan.old_table
    if old_table.batch != batch or plan.num_new != count:
        raise ValueError(
            f"rows of {batch} sequences and {count} tokens, where another layer of this forward "
            f"got {old_table.batch} and {plan.num_new}"
        )
    padding = parse_padding(start, batch)
    old_padding = tuple(old_table.reduce_to_sequences(old_table.padding).tolist())
    if padding != old_padding:
        raise ValueError(
            f"start {padding} for sequences with padding {old_padding}: the first rows set it, so "
            "leave `start` out"
        )


def check_append_fits(
    page_table: PageTable,
    plans: Iterable[AppendPlan],
    batch: int,
    count: int,
    tables_per_sequence: int,
    *,
    is_first: bool,
) -> None:
    """Refuse rows that do not fit `page_table`, the `plans` of the open forward, or a capacity.

    If `is_first`, these rows set the padding, which must equal that of the other plans.
    """
    if page_table.batch != batch:
        raise ValueError(
            f"rows of {batch} sequences for a cache of {page_table.batch}: the first append sets "
            "the batch; change it by repeat, select or kvant.merge"
        )
    if page_table.tables_per_sequence != tables_per_sequence:
        raise ValueError(
            f"rows of {tables_per_sequence} key heads for a layer of "
            f"{page_table.tables_per_sequence}"
        )
    padding = page_table.reduce_to_sequences(page_table.padding).tolist()
    for plan in plans:
        other = plan.old_table
        other_padding = other.reduce_to_sequences(other.padding).tolist()
        if other.batch != batch or (is_first and other_padding != padding):
            raise ValueError(
                f"rows of {batch} sequences with padding {padding}, but another layer of this "
                f"forward got {other.batch} with padding {other_padding}"
            )
    capacity = page_table.layer_group.capacity
    longest = int((page_table.lengths + count).max(initial=0))  # padding is not stored
    if capacity is not None and longest > capacity:
        raise CapacityError(
            f"{longest} tokens for a capacity of {capacity}: rewind, reset, or give the spec "
            f"capacity={longest} or none"
        )


def check_no_page_due(page_table: PageTable, count: int) -> None:
    """Refuse `count` tokens that complete a page which must be sealed at once."""
    new_lengths = np.maximum(page_table.lengths + count, 0)
    due = page_table.layer_group.paging.count_due_pages_each(new_lengths)
    if (indices := np.flatnonzero(due * page_table.layer_group.page > page_table.seq_lens)).size:
        raise CapacityError(
            f"plan_tokens({count}) at {int(page_table.seq_lens[indices[0]])} tokens: a new token "
            "completes a page, which must be sealed; use append()"
        )
