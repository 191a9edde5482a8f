"""One token after the other with nothing but tensors changing: a step that can be captured.

Where sequences are is a tensor that is updated in place, memory is what the layer has, and nothing
waits for the device. So a step goes into a CUDA graph, and is two operators to a compiler.

A cache knows nothing of the rows that steps write: who steps asks it to `expect` a token, and tells
it when it has `arrived`.
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

NO_NUMBER = -1  # where there is no number
FORM_KINDS = tuple(SEALED_FIELDS)


def write_token(view: View, page_table: TritonPageTable, keys: Tensor, values: Tensor) -> None:
    """Rows [B, H, 1, D] of a token, to the position that is the newest by `place`."""
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
    """Attention of a token's queries, in float32, over as much of the memory as `place` says."""
    kind = view.page_table.layer_group
    numbers = [
        *_encode_form(view.keys),
        *_encode_form(view.values),
        *(NO_NUMBER if n is None else n for n in (mask.window, mask.chunk, kind.paging.tail)),
        *(mask.sinks, kind.sinks, kind.page, kind.paging.dense_until),
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
    both = (key_pages, align_rows(keys)), (value_pages, align_rows(values))
    with use_device(key_pages.device):
        store.put_token[batch * heads,](
            tuple(make_copy_args(pages, pages, rows) for pages, rows in both),
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
    scope = KernelView(
        _make_side(keys, numbers[:3]),
        _make_side(values, numbers[3:6]),
        TritonPageTable(page_table, *numbers[13:]),
        LayerGroup(Paging(page, tail, dense_until), sinks=sinks),
    )
    mask = Mask(window=window, sinks=mask_sinks, chunk=chunk)
    return launch_attention(
        AttentionRequest(align_rows(q), scale, mask, softcap, sink_logits, return_lse=False), scope
    )[0]


@_attend_token_op.register_fake
def _(q: Tensor, keys: list[Tensor], values: list[Tensor], *rest: object) -> Tensor:
    return q.new_empty((*q.shape[:3], values[0].shape[3]), dtype=torch.float32)


def _encode_form(tensors: PagedTensors) -> tuple[int, int, int]:
    """Which of KINDS, bits, and group."""
    kind, bits, group, _ = astuple(get_form(tensors.codec))
    return FORM_KINDS.index(kind), bits, group


def _list_tensors(tensors: PagedTensors) -> list[Tensor]:
    """What `_half` takes: the fields in the order of FIELDS, whatever theirs is."""
    names = SEALED_FIELDS[get_form(tensors.codec).kind] if tensors.sealed else ()
    return [tensors.open, *(tensors.sealed[name] for name in names)]


def _make_side(tensors: list[Tensor], form_numbers: list[int]) -> TritonSide:
    kind, bits, group = form_numbers
    opened, *fields = tensors
    names = SEALED_FIELDS[FORM_KINDS[kind]]
    return TritonSide(
        Form(cast(Any, FORM_KINDS[kind]), bits, group),
        opened,
        dict(zip(names, fields, strict=False)),
    )


@dataclass(eq=False)
class TritonDecodeStep:
    """Appends the rows of a token of every sequence to a layer and attends over all of them.

    The place of its kind says how many tokens there are, those of this step included. Whoever steps
    moves it: with every token, and to where pages are once they are others.
    """

    view: View  # whose memory it is; the numbers are those of the place
    page_table: StaticTritonPageTable
    mask: Mask
    backend: str  # that reads the pages

    @classmethod
    def from_view(cls, view: View, page_table: StaticTritonPageTable) -> TritonDecodeStep:
        """From what a layer shows of a token that is expected."""
        device = view.keys.open.device.type
        backend = TritonBackend("interpreted" if device == "cpu" else "triton", device)
        if (reason := backend.supports(view)) is not None:
            raise UnsupportedView(f"no steps behind this view: {reason}")
        if view.selection is not None:
            raise UnsupportedView("no steps behind this view: each token selects pages")
        return cls(view, page_table, view.mask, backend.name)

    def rebind(self, view: View) -> bool:
        """Go on from a later view of the same layer; False where its memory is another."""
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
        """Outputs [B, heads, 1, Dv], as `append` and then `attend` give them."""
        pages = self.view
        self._check_token(q, keys, values, sink_logits)
        of_keys, of_values = pages.keys.codec.frame, pages.values.codec.frame
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        write_token(
            pages, self.page_table, of_keys.transform_rows(keys), of_values.transform_rows(values)
        )
        asked = of_keys.transform_queries(q)
        rest = scale, softcap, sink_logits
        out = attend_token(pages, self.mask, self.page_table, asked, *rest)
        return of_values.restore_outputs(out).to(q.dtype)

    def _check_token(
        self, q: Tensor, keys: Tensor, values: Tensor, sink_logits: Tensor | None
    ) -> None:
        """Refuse what is not one token as the pages hold them."""
        batch = len(self.page_table.integers)
        for name, rows, held in (
            ("keys", keys, self.view.keys.open),
            ("values", values, self.view.values.open),
        ):
            needed = [batch, held.shape[1], 1, held.shape[3]]
            same = rows.dtype == held.dtype and rows.device == held.device
            if list(rows.shape) != needed or not same:
                raise ValueError(
                    f"{name} {list(rows.shape)} of {rows.dtype} on {rows.device}: a step takes one "
                    f"token, {needed} of {held.dtype} on {held.device}"
                )
        heads, dim = keys.shape[1::2]
        fits = q.ndim == 4 and (q.shape[0], *q.shape[2:]) == (batch, 1, dim)
        fits = fits and q.shape[1] > 0 and q.shape[1] % heads == 0
        if not fits or q.dtype not in DTYPES or q.device != keys.device:
            raise ValueError(
                f"queries {list(q.shape)} of {q.dtype} on {q.device}: a step takes those of one "
                f"token, [{batch}, a multiple of {heads}, 1, {dim}] of 16 or 32 bits on "
                f"{keys.device}"
            )
        if sink_logits is not None and sink_logits.shape != (q.shape[1],):
            raise ValueError(
                f"sink_logits {list(sink_logits.shape)} for {q.shape[1]} heads: one a head"
            )


def _get_memory_key(view: View) -> tuple[object, ...]:
    """What the kernels were told of a layer, but for the numbers that a place has."""
    sides = view.keys, view.values
    tensors = [tensor for side in sides for tensor in (side.open, *side.sealed.values())]
    lies = tuple((tensor.data_ptr(), tensor.shape) for tensor in tensors)
    return lies, view.keys.codec, view.values.codec, view.mask, view.page_table.layer_group
