"""One token after the other with nothing but tensors changing: a step that can be captured.

What changes from token to token is a tensor that is updated in place, memory is what the layer has,
and nothing waits for the device. So a step goes into a CUDA graph, and is two operators to a
compiler.

A layer knows nothing of the rows that steps write: who steps asks it to `expect` them, and tells it
that they `arrive`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvant.attention.triton import Triton, operators
from kvant.attention.triton.forms import DTYPES
from kvant.contracts import Side, View
from kvant.errors import CapacityError, UnsupportedView


@dataclass(eq=False)
class Step:
    """Appends the rows of a token to a layer and attends over all of them.

    `place[0]` is how many tokens there are, that of this step included: whoever steps sets it.
    """

    view: View  # all the memory that there is, used or not
    place: Tensor  # [4]: tokens, the most of them, the page and the column that lie first
    until: int  # the length that no step may pass: beyond it nothing is written
    backend: str  # that reads the pages

    @classmethod
    def of(cls, view: View, place: Tensor) -> Step:
        """From a view on whose newest row is `expect`ed, as far as memory or sealed pages go."""
        device = view.start.device.type
        backend = Triton("interpreted" if device == "cpu" else "triton", device)
        if (reason := backend.supports(view)) is not None:
            raise UnsupportedView(f"no steps behind this view: {reason}")
        fields = list(view.keys.sealed.values())
        pages = fields[0].shape[0] // len(view.start) if fields else 0
        table = view.page_table.new_zeros(len(view.start), pages)
        step = cls(replace(view, page_table=table), place, 0, backend.name)
        step._go_on(view)
        return step

    def follow(self, view: View) -> bool:
        """Go on from a later view of the same layer; False where its memory is not the same."""
        if _memory(view) != _memory(self.view):
            return False
        self._go_on(view)
        return True

    def _go_on(self, view: View) -> None:
        first = view.padding + view.keys.sinks.shape[2]
        if view.columns <= first:  # a step writes no sinks
            raise CapacityError(
                f"{view.columns - 1} tokens: steps can follow once {first} are there"
            )
        room = view.keys.room.shape[2] - view.keys.slot
        sealed = view.first_page + view.page_table.shape[1]
        due = view.paging.due
        until = next(n for n in range(view.dense_from + room, -1, -1) if due(n) <= sealed)
        if until < view.columns:
            raise CapacityError(
                f"no room for a step behind {view.columns - 1} tokens: the page of its own row "
                "falls due with it; append it"
            )
        lies = view.first_page, view.dense_from - view.keys.slot
        self.view.page_table[:, : view.page_table.shape[1]] = view.page_table
        self.place.copy_(torch.tensor([view.columns, until, *lies]))
        self.until = until

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
        view = self.view
        self._check(q, keys, values, sink_logits)
        of_keys, of_values = view.keys.codec.frame, view.values.codec.frame
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        operators.put(view, self.place, of_keys.rows(keys), of_values.rows(values))
        asked = of_keys.queries(q)
        out = operators.decode(view, self.place, asked, scale, softcap, sink_logits)
        return of_values.outputs(out).to(q.dtype)

    def _check(self, q: Tensor, keys: Tensor, values: Tensor, logits: Tensor | None) -> None:
        """Refuse what is not one token as the rooms hold them."""
        for name, rows, room in (
            ("keys", keys, self.view.keys.room),
            ("values", values, self.view.values.room),
        ):
            needed = [*room.shape[:2], 1, room.shape[3]]
            same = rows.dtype == room.dtype and rows.device == room.device
            if list(rows.shape) != needed or not same:
                raise ValueError(
                    f"{name} {list(rows.shape)} of {rows.dtype} on {rows.device}: a step takes one "
                    f"token, {needed} of {room.dtype} on {room.device}"
                )
        batch, heads, _, dim = keys.shape
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


def _memory(view: View) -> tuple[object, ...]:
    """What the kernels were told of a view, but for the numbers that a step changes."""
    tensors = (*_tensors(view.keys), *_tensors(view.values), view.start)
    lies = tuple((tensor.data_ptr(), tensor.shape) for tensor in tensors)
    return lies, view.keys.codec, view.values.codec, view.mask, view.paging


def _tensors(side: Side) -> tuple[Tensor, ...]:
    return (side.room, side.sinks, *side.sealed.values())
