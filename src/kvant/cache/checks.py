"""Rows at the door of an attention layer: what does not fit is refused before anything changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvant.contracts import Fields, Order
from kvant.dtypes import DTYPES
from kvant.errors import CapacityError
from kvant.page_table import AppendPlan, PageTable
from kvant.recipes import LayerSpec


class RowGeometry(Protocol):
    """What the rows before these were like."""

    def matches(self, rows: Fields) -> bool: ...


def check_order(order: str) -> None:
    if order not in ("BHTD", "BTHD"):
        raise ValueError(f"order {order!r}: 'BHTD' or 'BTHD' is needed")


def prepare_rows(
    spec: LayerSpec, keys: Tensor, values: Tensor | None, order: Order, geometry: RowGeometry | None
) -> tuple[Fields, bool]:
    """The tensors of an append as {side: [B, H, T, D]}, or a ValueError.

    Are they like the rows before? Then they need no second look.
    """
    if (values is None) != (spec.value_dim is not None):
        raise ValueError("values come with the keys, unless the spec's value_dim finds them there")
    rows = {"keys": keys} if values is None else {"keys": keys, "values": values}
    if order == "BHTD" and geometry is not None and geometry.matches(rows):
        if keys.requires_grad or (values is not None and values.requires_grad):
            rows = {n: t.detach() for n, t in rows.items()}
        return rows, True
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
    return {name: _convert_row_dtype(tensor, spec.dtype) for name, tensor in rows.items()}, False


def _convert_row_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Without a graph, in the dtype of the spec; a call that changes nothing still takes time."""
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
    """Columns of padding of each sequence, as they are told with the first rows."""
    columns = torch.as_tensor(start)
    if columns.ndim != 1 or columns.is_floating_point() or columns.dtype == torch.bool:
        raise ValueError(f"start {start}: one whole number a sequence is needed")
    given = tuple(columns.tolist())
    if len(given) != batch or min(given, default=0) < 0:
        raise ValueError(f"start {given}: one number >= 0 for each of {batch}")
    return given


def check_same_forward(plan: AppendPlan, batch: int, count: int, start: Any) -> None:
    """Refuse rows that are not of the forward under way."""
    before = plan.old_table
    if before.batch != batch or plan.num_new != count:
        raise ValueError(
            f"rows of {batch} sequences and {count} tokens, where another layer of this forward "
            f"got {before.batch} and {plan.num_new}"
        )
    given, began = (
        parse_padding(start, batch),
        tuple(before.reduce_to_sequences(before.padding).tolist()),
    )
    if given != began:
        raise ValueError(f"start {given} for sequences that began at {began}")


def check_no_page_due(page_table: PageTable) -> None:
    """Refuse one more row of each sequence if a page falls due with it."""
    due = page_table.layer_group.paging.count_due_pages_each(np.maximum(page_table.lengths + 1, 0))
    if (late := np.flatnonzero(due * page_table.layer_group.page > page_table.seq_lens)).size:
        raise CapacityError(
            f"no room for a row behind {int(page_table.seq_lens[late[0]])} tokens: its page falls "
            "due with "
            "it; append it"
        )
