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

from kvant.attention.triton import Triton
from kvant.attention.triton.forms import DTYPES, FIELDS, Half, MovingPlace, Place, beside, known
from kvant.attention.triton.launching import Scope, launch
from kvant.attention.triton.sealing import way
from kvant.contracts import Form, Mask, Request, Stored, View
from kvant.errors import UnsupportedView
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
    from kvant.attention.triton.kernels import store

    batch, heads = keys.shape[:2]
    both = (key_pages, beside(keys)), (value_pages, beside(values))
    with on(key_pages.device):
        store.put_token[batch * heads,](
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


@dataclass(eq=False)
class Step:
    """Appends the rows of a token of every sequence to a layer and attends over all of them.

    The place of its kind says how many tokens there are, those of this step included. Whoever steps
    moves it: with every token, and to where pages are once they are others.
    """

    pages: View  # whose memory it is; the numbers are those of the place
    place: MovingPlace
    mask: Mask
    backend: str  # that reads the pages

    @classmethod
    def of(cls, pages: View, place: MovingPlace) -> Step:
        """From what a layer shows of a token that is expected."""
        device = pages.keys.open.device.type
        backend = Triton("interpreted" if device == "cpu" else "triton", device)
        if (reason := backend.supports(pages)) is not None:
            raise UnsupportedView(f"no steps behind this view: {reason}")
        if pages.selecting is not None:
            raise UnsupportedView("no steps behind this view: each token selects pages")
        return cls(pages, place, pages.mask, backend.name)

    def follow(self, pages: View) -> bool:
        """Go on from a later view of the same layer; False where its memory is another."""
        return _memory(pages) == _memory(self.pages)

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
        pages = self.pages
        self._check(q, keys, values, sink_logits)
        of_keys, of_values = pages.keys.codec.frame, pages.values.codec.frame
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        put(pages, self.place, of_keys.rows(keys), of_values.rows(values))
        asked = of_keys.queries(q)
        rest = scale, softcap, sink_logits
        out = decode(pages, self.mask, self.place, asked, *rest)
        return of_values.outputs(out).to(q.dtype)

    def _check(self, q: Tensor, keys: Tensor, values: Tensor, logits: Tensor | None) -> None:
        """Refuse what is not one token as the pages hold them."""
        batch = len(self.place.rows)
        for name, rows, held in (
            ("keys", keys, self.pages.keys.open),
            ("values", values, self.pages.values.open),
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
        if logits is not None and logits.shape != (q.shape[1],):
            raise ValueError(f"sink_logits {list(logits.shape)} for {q.shape[1]} heads: one a head")


def _memory(pages: View) -> tuple[object, ...]:
    """What the kernels were told of a layer, but for the numbers that a place has."""
    sides = pages.keys, pages.values
    tensors = [tensor for side in sides for tensor in (side.open, *side.sealed.values())]
    lies = tuple((tensor.data_ptr(), tensor.shape) for tensor in tensors)
    return lies, pages.keys.codec, pages.values.codec, pages.mask, pages.extent.kind
