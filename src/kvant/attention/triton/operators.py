"""The kernels as operators of PyTorch: a compiler sees what they take and give, and no more.

Operators take tensors and numbers, so a view is taken apart and put together again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from kvant.attention.triton.forms import power
from kvant.attention.triton.launching import launch
from kvant.codecs import Affine, Codebook, Raw
from kvant.contracts import Codec, Fields, Mask, Request, Side, Tally, View
from kvant.extent import Paging
from kvant.launches import on

FIELDS: dict[type, tuple[str, ...]] = {
    Raw: ("rows",),
    Affine: ("codes", "scale", "bias"),
    Codebook: ("codes", "scale"),
}
NONE = -1  # where there is no number


def put(view: View, place: Tensor, keys: Tensor, values: Tensor) -> None:
    """Rows [B, H, 1, D] of a token, to the column that is the newest by `place`."""
    _put(view.keys.room, view.values.room, keys, values, place)


def decode(
    view: View,
    place: Tensor,
    q: Tensor,
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> Tensor:
    """Attention of a token's queries, in float32, over as much of the memory as `place` says."""
    mask, paging = view.mask, view.paging
    numbers = [
        *_numbers(view.keys.codec),
        *_numbers(view.values.codec),
        *(NONE if n is None else n for n in (mask.window, mask.chunk, paging.tail)),
        *(mask.sinks, paging.page, paging.dense_until),
    ]
    keys, values = _tensors(view.keys), _tensors(view.values)
    rest = numbers, scale, softcap, sink_logits
    out: Tensor = _decode(q, keys, values, view.page_table, view.start, place, *rest)
    return out


@custom_op("kvant::put", mutates_args=("key_room", "value_room"))
def _put(key_room: Tensor, value_room: Tensor, keys: Tensor, values: Tensor, place: Tensor) -> None:
    from kvant.attention.triton.kernels.put import put
    from kvant.attention.triton.kernels.records import Rows

    batch, heads, _, dim = keys.shape
    wide = values.shape[3]
    keys, values = _beside(keys), _beside(values)
    with on(key_room.device):
        put[batch * heads,](
            *(Rows(rows, *rows.stride()[:3]) for rows in (key_room, value_room, keys, values)),
            place,
            HEADS=heads,
            KEY_DIM=dim,
            KEY_WIDE=power(dim),
            VALUE_DIM=wide,
            VALUE_WIDE=power(wide),
            enable_fp_fusion=True,
        )


@custom_op("kvant::decode", mutates_args=())
def _decode(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    table: Tensor,
    start: Tensor,
    place: Tensor,
    numbers: list[int],
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> Tensor:
    window, chunk, tail = (None if n == NONE else n for n in numbers[6:9])
    sinks, page, dense_until = numbers[9:]
    room = keys[0].shape[2]
    view = View(
        keys=_side(keys, numbers[:3]),
        values=_side(values, numbers[3:6]),
        page_table=table,
        start=start,
        mask=Mask(window=window, sinks=sinks, chunk=chunk),
        columns=room,
        padding=0,
        paging=Paging(page, tail, dense_until),
        first_page=0,
        dense_from=0,
        own_from=room,
        value_dim=values[0].shape[3],
        tiles=None,
        tally=Tally(),
    )
    request = Request(_beside(q), scale, view.mask, softcap, sink_logits, lse=False)
    return launch(request, view, place)[0]


@_decode.register_fake
def _(q: Tensor, keys: list[Tensor], values: list[Tensor], *rest: object) -> Tensor:
    return q.new_empty((*q.shape[:3], values[0].shape[3]), dtype=torch.float32)


def _beside(rows: Tensor) -> Tensor:
    """The channels of a row side by side, as kernels read them."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _numbers(codec: Codec) -> tuple[int, int, int]:
    """Which of FIELDS, bits, and group."""
    kind = list(FIELDS).index(type(codec))
    return kind, getattr(codec, "bits", NONE), getattr(codec, "group", NONE)


def _tensors(side: Side) -> list[Tensor]:
    """What `_side` takes: the fields in the order of FIELDS, whatever theirs is."""
    fields = [side.sealed[name] for name in FIELDS[type(side.codec)]] if side.sealed else []
    return [side.room, side.sinks, *fields]


def _side(tensors: list[Tensor], numbers: list[int]) -> Side:
    """All of the room: which rows of it are there, a step tells the kernels."""
    room, sinks, *fields = tensors
    kind, bits, group = numbers
    made = list(FIELDS)[kind]
    codec: Codec = (
        Raw() if made is Raw else Affine(bits, group) if made is Affine else Codebook(bits)
    )
    sealed: Fields = dict(zip(FIELDS[made], fields, strict=False))
    return Side(codec, sealed, room, 0, room.shape[2], sinks)
