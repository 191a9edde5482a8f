"""One token after the other with nothing but tensors changing: a step that can be captured.

Where sequences are is a tensor that is updated in place, memory is what the layer has, and nothing
waits for the device. So a step goes into a CUDA graph, and is two operators to a compiler.

A cache knows nothing of the rows that steps write: who steps asks it to `expect` a token, and tells
it when it has `arrived`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvant.attention.triton import Triton, operators
from kvant.attention.triton.forms import DTYPES
from kvant.attention.triton.places import MovingPlace
from kvant.contracts import Mask, Stored, View
from kvant.errors import UnsupportedView


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
        return cls(pages, place, pages.mask, backend.name)

    def follows(self, pages: View) -> bool:
        """May it go on from a later view of the same layer? Not where its memory is another."""
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
        operators.put(pages, self.place, of_keys.rows(keys), of_values.rows(values))
        asked = of_keys.queries(q)
        rest = scale, softcap, sink_logits
        out = operators.decode(pages, self.mask, self.place, asked, *rest)
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
    tensors = (*_tensors(pages.keys), *_tensors(pages.values))
    lies = tuple((tensor.data_ptr(), tensor.shape) for tensor in tensors)
    return lies, pages.keys.codec, pages.values.codec, pages.mask, pages.extent.kind


def _tensors(side: Stored) -> tuple[Tensor, ...]:
    return (side.open, *side.sealed.values())
