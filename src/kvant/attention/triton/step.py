"""One token after the other with nothing but tensors changing: a step that can be captured.

The number of tokens is a tensor that is updated in place, memory is what a fixed capacity took, and
nothing waits for the device. So a step goes into a CUDA graph, and is two operators to a compiler.

A layer knows nothing of the rows that steps write: who is done appends the same rows to it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from kvant.attention.triton import Triton, operators
from kvant.attention.triton.forms import DTYPES
from kvant.contracts import View
from kvant.errors import CapacityError, UnsupportedView


@dataclass(frozen=True)
class Step:
    """Appends the rows of a token behind a view and attends over all of them.

    `length` is that of the view to begin with; whoever steps adds 1 to it before the first layer.
    """

    view: View
    length: Tensor  # [1]: tokens, the one of this step included
    until: int  # the length that no step may pass: beyond it nothing is written

    @classmethod
    def of(cls, view: View, length: Tensor) -> Step:
        """Behind a view of the newest token of a layer, up to where its memory or its pages end."""
        device = view.start.device.type
        if (reason := Triton(device=device).supports(view)) is not None:
            raise UnsupportedView(f"no steps behind this view: {reason}")
        first = view.padding + view.keys.sinks.shape[2]
        if view.columns < first:
            raise CapacityError(f"{view.columns} tokens: steps can follow once {first} are there")
        room = view.keys.room.shape[2] - view.keys.slot
        until = view.dense_from + room
        sealed = view.first_page + view.page_table.shape[1]
        until = next(n for n in range(until, -1, -1) if view.paging.due(n) <= sealed)
        if until <= view.columns:
            raise CapacityError(
                f"no room for a step behind {view.columns} tokens: append a token to the layer, "
                "whose spec needs a capacity, and make the step again"
            )
        count = until - view.dense_from
        keys, values = replace(view.keys, count=count), replace(view.values, count=count)
        return cls(replace(view, keys=keys, values=values), length, until)

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
        operators.put(view, self.length, of_keys.rows(keys), of_values.rows(values))
        asked = of_keys.queries(q)
        out = operators.decode(view, self.length, asked, scale, softcap, sink_logits)
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
