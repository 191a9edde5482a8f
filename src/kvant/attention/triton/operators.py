"""The kernels as operators of PyTorch: a compiler sees what they take and give, and no more.

Operators take tensors and numbers, so what a step reads is taken apart and put together again.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any, cast

import torch
from torch import Tensor
from torch.library import custom_op

from kvant.attention.triton.forms import FIELDS, Half, beside, known
from kvant.attention.triton.launching import Scope, launch
from kvant.attention.triton.places import Place
from kvant.attention.triton.sealing import way
from kvant.contracts import Form, Mask, Request, Stored, View
from kvant.extent import Kind, Paging
from kvant.launches import on

NONE = -1  # where there is no number
KINDS = tuple(FIELDS)


def put(pages: View, place: Place, keys: Tensor, values: Tensor) -> None:
    """Rows [B, H, 1, D] of a token, to the position that is the newest by `place`."""
    _put(pages.keys.open, pages.values.open, keys, values, place.rows, place.open_at)


def decode(
    pages: View,
    mask: Mask,
    place: Place,
    q: Tensor,
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> Tensor:
    """Attention of a token's queries, in float32, over as much of the memory as `place` says."""
    kind = pages.extent.kind
    numbers = [
        *_numbers(pages.keys),
        *_numbers(pages.values),
        *(NONE if n is None else n for n in (mask.window, mask.chunk, kind.paging.tail)),
        *(mask.sinks, kind.sinks, kind.page, kind.paging.dense_until),
        *(place.open_at, place.stored, place.opened),
    ]
    keys, values = _tensors(pages.keys), _tensors(pages.values)
    out: Tensor = _decode(q, keys, values, place.rows, numbers, scale, softcap, sink_logits)
    return out


@custom_op("kvant::put", mutates_args=("key_pages", "value_pages"))
def _put(
    key_pages: Tensor,
    value_pages: Tensor,
    keys: Tensor,
    values: Tensor,
    place: Tensor,
    open_at: int,
) -> None:
    from kvant.attention.triton.kernels import put

    batch, heads = keys.shape[:2]
    both = (key_pages, beside(keys)), (value_pages, beside(values))
    with on(key_pages.device):
        put.put_token[batch * heads,](
            tuple(way(pages, pages, rows) for pages, rows in both),
            place,
            place.shape[1],
            open_at,
            PAGE=key_pages.shape[2],
            HEADS=heads,
        )


@custom_op("kvant::decode", mutates_args=())
def _decode(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    place: Tensor,
    numbers: list[int],
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> Tensor:
    window, chunk, tail = (None if n == NONE else n for n in numbers[6:9])
    mask_sinks, sinks, page, dense_until = numbers[9:13]
    scope = Scope(
        _half(keys, numbers[:3]),
        _half(values, numbers[3:6]),
        Place(place, *numbers[13:]),
        Kind(Paging(page, tail, dense_until), sinks=sinks),
    )
    mask = Mask(window=window, sinks=mask_sinks, chunk=chunk)
    return launch(Request(beside(q), scale, mask, softcap, sink_logits, lse=False), scope)[0]


@_decode.register_fake
def _(q: Tensor, keys: list[Tensor], values: list[Tensor], *rest: object) -> Tensor:
    return q.new_empty((*q.shape[:3], values[0].shape[3]), dtype=torch.float32)


def _numbers(side: Stored) -> tuple[int, int, int]:
    """Which of KINDS, bits, and group."""
    kind, bits, group, _ = astuple(known(side.codec))
    return KINDS.index(kind), bits, group


def _tensors(side: Stored) -> list[Tensor]:
    """What `_half` takes: the fields in the order of FIELDS, whatever theirs is."""
    names = FIELDS[known(side.codec).kind] if side.sealed else ()
    return [side.open, *(side.sealed[name] for name in names)]


def _half(tensors: list[Tensor], numbers: list[int]) -> Half:
    kind, bits, group = numbers
    opened, *fields = tensors
    names = FIELDS[KINDS[kind]]
    return Half(
        Form(cast(Any, KINDS[kind]), bits, group), opened, dict(zip(names, fields, strict=False))
    )
