"""Operators of one token on the GPU that a CUDA graph can capture and torch.compile can compile.

The page table is a tensor updated in place, storage addresses are fixed, and no operation
synchronizes with the device. A compiler sees `write_token` and `attend_token` as one operator each.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any, cast

import torch
from torch import Tensor
from torch.library import custom_op

from kvant.attention.triton.arguments import (
    SEALED_FIELDS,
    TritonPageTable,
    TritonSide,
    align_rows,
    get_form,
)
from kvant.attention.triton.kernel_launch import KernelView, launch_attention
from kvant.attention.triton.store_pages import make_copy_args
from kvant.contracts import AttentionRequest, Form, Mask, PagedTensors, View
from kvant.page_table import LayerGroup, Paging
from kvant.platform.torch_runtime import use_device

NO_NUMBER = -1  # encodes None in lists of integers
FORM_KINDS = tuple(SEALED_FIELDS)


def write_token(view: View, page_table: TritonPageTable, keys: Tensor, values: Tensor) -> None:
    """Write a token's rows [B, H, 1, D] to the newest position of each sequence."""
    _write_token_op(
        view.keys.open, view.values.open, keys, values, page_table.integers, page_table.open_offset
    )


def attend_token(view: View, page_table: TritonPageTable, request: AttentionRequest) -> Tensor:
    """Compute attention of a token's queries over all rows of `page_table`, in float32."""
    mask, group = request.mask, view.page_table.layer_group
    assert isinstance(mask, Mask)
    numbers = [
        *_encode_form(view.keys),
        *_encode_form(view.values),
        *(NO_NUMBER if n is None else n for n in (mask.window, mask.chunk, group.paging.tail)),
        *(mask.sinks, group.sinks, group.page, group.paging.dense_until),
        *(page_table.open_offset, page_table.max_sealed_rows, page_table.max_open_rows),
    ]
    keys, values = _list_tensors(view.keys), _list_tensors(view.values)
    out: Tensor = _attend_token_op(
        request.q,
        keys,
        values,
        page_table.integers,
        numbers,
        request.scale,
        request.softcap,
        request.sink_logits,
    )
    return out


@custom_op("kvant::put", mutates_args=("key_pages", "value_pages"))
def _write_token_op(
    key_pages: Tensor,
    value_pages: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    open_offset: int,
) -> None:
    from kvant.attention.triton.kernels import store

    batch, heads = keys.shape[:2]
    sides = (key_pages, align_rows(keys)), (value_pages, align_rows(values))
    with use_device(key_pages.device):
        store.put_token[batch * heads,](
            tuple(make_copy_args(pages, pages, rows) for pages, rows in sides),
            page_table,
            page_table.shape[1],
            open_offset,
            PAGE=key_pages.shape[2],
            HEADS=heads,
        )


@custom_op("kvant::decode", mutates_args=())
def _attend_token_op(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    page_table: Tensor,
    numbers: list[int],
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> Tensor:
    window, chunk, tail = (None if n == NO_NUMBER else n for n in numbers[6:9])
    mask_sinks, sinks, page, dense_until = numbers[9:13]
    kernel_view = KernelView(
        _make_side(keys, numbers[:3]),
        _make_side(values, numbers[3:6]),
        TritonPageTable(page_table, *numbers[13:]),
        LayerGroup(Paging(page, tail, dense_until), sinks=sinks),
    )
    mask = Mask(window=window, sinks=mask_sinks, chunk=chunk)
    request = AttentionRequest(align_rows(q), scale, mask, softcap, sink_logits, return_lse=False)
    return launch_attention(request, kernel_view)[0]


@_attend_token_op.register_fake
def _(q: Tensor, keys: list[Tensor], values: list[Tensor], *rest: object) -> Tensor:
    return q.new_empty((*q.shape[:3], values[0].shape[3]), dtype=torch.float32)


def _encode_form(tensors: PagedTensors) -> tuple[int, int, int]:
    """Return a codec's form as integers: index in FORM_KINDS, bits, group."""
    kind, bits, group, _ = astuple(get_form(tensors.codec))
    return FORM_KINDS.index(kind), bits, group


def _list_tensors(tensors: PagedTensors) -> list[Tensor]:
    """Return the tensors that `_make_side` takes: open pages, then fields as in SEALED_FIELDS."""
    names = SEALED_FIELDS[get_form(tensors.codec).kind] if tensors.sealed else ()
    return [tensors.open, *(tensors.sealed[name] for name in names)]


def _make_side(tensors: list[Tensor], form_numbers: list[int]) -> TritonSide:
    kind, bits, group = form_numbers
    open_pages, *fields = tensors
    names = SEALED_FIELDS[FORM_KINDS[kind]]
    return TritonSide(
        Form(cast(Any, FORM_KINDS[kind]), bits, group),
        open_pages,
        dict(zip(names, fields, strict=False)),
    )
