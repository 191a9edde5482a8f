"""Decode steps on the GPU that a CUDA graph can capture and torch.compile can compile.

The page table is a tensor updated in place, storage addresses are fixed, and no operation
synchronizes with the device. A compiler sees a step as two operators.

The cache does not see the rows that steps write: the caller must `expect` each token, and call
`arrive` after it.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.library import custom_op

from kvant.attention.triton import TritonBackend
from kvant.attention.triton.arguments import (
    DTYPES,
    SEALED_FIELDS,
    StaticTritonPageTable,
    TritonPageTable,
    TritonSide,
    align_rows,
    get_form,
)
from kvant.attention.triton.kernel_launch import KernelView, launch_attention
from kvant.attention.triton.store_pages import make_copy_args
from kvant.contracts import AttentionRequest, Form, Mask, PagedTensors, View
from kvant.errors import UnsupportedView
from kvant.page_table import LayerGroup, Paging
from kvant.triton_runtime import use_device

NO_NUMBER = -1  # encodes None in lists of integers
FORM_KINDS = tuple(SEALED_FIELDS)


def write_token(view: View, page_table: TritonPageTable, keys: Tensor, values: Tensor) -> None:
    """Write a token's rows [B, H, 1, D] to the newest position of each sequence."""
    _write_token_op(
        view.keys.open, view.values.open, keys, values, page_table.integers, page_table.open_offset
    )


def attend_token(
    view: View,
    mask: Mask,
    page_table: TritonPageTable,
    q: Tensor,
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> Tensor:
    """Compute attention of a token's queries over all rows of `page_table`, in float32."""
    group = view.page_table.layer_group
    numbers = [
        *_encode_form(view.keys),
        *_encode_form(view.values),
        *(NO_NUMBER if n is None else n for n in (mask.window, mask.chunk, group.paging.tail)),
        *(mask.sinks, group.sinks, group.page, group.paging.dense_until),
        *(page_table.open_offset, page_table.max_sealed_rows, page_table.max_open_rows),
    ]
    keys, values = _list_tensors(view.keys), _list_tensors(view.values)
    out: Tensor = _attend_token_op(
        q, keys, values, page_table.integers, numbers, scale, softcap, sink_logits
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


@dataclass(eq=False)
class TritonDecodeStep:
    """Decode step of one layer: append a token to every sequence, then attend to all rows.

    `page_table` counts the tokens, those of this step included. The caller advances it with every
    token, and updates it when pages change.
    """

    view: View  # the layer's storage; lengths and slots are read from `page_table`
    page_table: StaticTritonPageTable
    mask: Mask
    backend: str

    @classmethod
    def from_view(cls, view: View, page_table: StaticTritonPageTable) -> TritonDecodeStep:
        """Make a step from a layer's view of the expected token."""
        device = view.keys.open.device.type
        backend = TritonBackend("interpreted" if device == "cpu" else "triton", device)
        if (reason := backend.supports(view)) is not None:
            raise UnsupportedView(f"no decode steps for this view: {reason}")
        if view.selection is not None:
            raise UnsupportedView("no decode steps for this view: each token selects pages")
        return cls(view, page_table, view.mask, backend.name)

    def rebind(self, view: View) -> bool:
        """Tell whether a later view of the same layer has the same storage addresses."""
        return _get_memory_key(view) == _get_memory_key(self.view)

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
        """Return outputs [B, heads, 1, Dv], equal to those of `append` and then `attend`."""
        view, page_table = self.view, self.page_table
        self._check_token(q, keys, values, sink_logits)
        key_frame, value_frame = view.keys.codec.frame, view.values.codec.frame
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        keys, values = key_frame.transform_rows(keys), value_frame.transform_rows(values)
        write_token(view, page_table, keys, values)
        queries = key_frame.transform_queries(q)
        out = attend_token(view, self.mask, page_table, queries, scale, softcap, sink_logits)
        return value_frame.restore_outputs(out).to(q.dtype)

    def _check_token(
        self, q: Tensor, keys: Tensor, values: Tensor, sink_logits: Tensor | None
    ) -> None:
        """Raise ValueError unless the rows and queries are one token that fits the pages."""
        batch = len(self.page_table.integers)
        for name, rows, pages in (
            ("keys", keys, self.view.keys.open),
            ("values", values, self.view.values.open),
        ):
            needed = [batch, pages.shape[1], 1, pages.shape[3]]
            same = rows.dtype == pages.dtype and rows.device == pages.device
            if list(rows.shape) != needed or not same:
                raise ValueError(
                    f"{name} {list(rows.shape)} of {rows.dtype} on {rows.device}: a step takes one "
                    f"token, {needed} of {pages.dtype} on {pages.device}"
                )
        heads, dim = keys.shape[1::2]
        fits = q.ndim == 4 and (q.shape[0], *q.shape[2:]) == (batch, 1, dim)
        fits = fits and q.shape[1] > 0 and q.shape[1] % heads == 0
        if not fits or q.dtype not in DTYPES or q.device != keys.device:
            raise ValueError(
                f"queries {list(q.shape)} of {q.dtype} on {q.device}: a step takes one token, "
                f"[{batch}, a multiple of {heads}, 1, {dim}] of 16 or 32 bits on "
                f"{keys.device}"
            )
        if sink_logits is not None and sink_logits.shape != (q.shape[1],):
            raise ValueError(
                f"sink_logits of shape {list(sink_logits.shape)} for {q.shape[1]} heads: "
                "one per head is needed"
            )


def _get_memory_key(view: View) -> tuple[object, ...]:
    """Return what a captured launch depends on besides the page table: addresses and settings."""
    sides = view.keys, view.values
    tensors = [tensor for side in sides for tensor in (side.open, *side.sealed.values())]
    storage = tuple((tensor.data_ptr(), tensor.shape) for tensor in tensors)
    return storage, view.keys.codec, view.values.codec, view.mask, view.page_table.layer_group
