"""Attention over a view: one call, a plain list of backends, and no silent fallback."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from kvant.attention.native import Native, arrangement
from kvant.attention.opening import dense_rows, framed_rows, open_pages
from kvant.attention.reference import Reference
from kvant.attention.triton import Triton
from kvant.attention.triton.step import Step
from kvant.contracts import Backend, Codec, Fields, Mask, Request, Tally, Tiles, View
from kvant.errors import UnsupportedView
from kvant.lasting import check_lasts

__all__ = [
    "BACKENDS",
    "Explanation",
    "Step",
    "arrangement",
    "attend",
    "dense_rows",
    "explain",
    "framed_rows",
    "open_pages",
    "seal",
]

# In order of preference. The reference serves everything: what stands behind it runs where it is
# asked for by name.
BACKENDS: list[Backend] = [
    Native(),
    Triton(),
    Reference(),
    Reference("dequantize", at_once=sys.maxsize),
    Triton("interpreted", device="cpu"),
]


@dataclass(frozen=True)
class Explanation:
    """Which backend reads a view, and why the ones before it do not."""

    backend: str
    refused: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{self.backend}: reads this view"]
        return "\n".join(lines + [f"{name}: {reason}" for name, reason in self.refused])


def attend(
    q: Tensor,
    view: View,
    *,
    scale: float | None = None,
    mask: Mask | Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of `q` [B, heads, T, D], the newest T columns, over a view: [B, heads, T, Dv].

    An explicit `mask` tensor (booleans, True = seen, or numbers to add) replaces the view's rule;
    its last dimension is aligned to the newest column; what lies before it, or was let go, is not
    seen. No gradients are recorded.
    """
    check_lasts("attend")
    _check(q, view, mask, sink_logits)
    with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        rule = view.mask if mask is None else _four_dimensions(mask)
        framed, frame = view.keys.codec.frame.queries(q), view.values.codec.frame
        # Outputs that are still to leave a frame are not rounded before that.
        dtype = q.dtype if frame.trivial else torch.float32
        request = Request(framed, scale, rule, softcap, sink_logits, return_lse, dtype)
        chosen = _choose(view, request, backend)
        out, lse = chosen.attend(request, view)
        view.tally.attended[chosen.name] += 1
        out = frame.outputs(out)
        if out.shape[3] > view.value_dim:
            out = out[..., : view.value_dim]
        out = out if out.dtype == q.dtype else out.to(q.dtype)
        return out if lse is None else (out, lse)


@singledispatch
def explain(view: Any) -> Any:
    """Which backend would read this view, and why the others would not.

    A host's cache explains itself, layer by layer.
    """
    raise TypeError(f"{type(view).__name__} cannot be explained: a view or a host's cache can")


@explain.register
def _(view: View) -> Explanation:
    chosen, refused = _survey(view, None)
    return Explanation(chosen.name, refused)


def seal(codec: Codec, rows: Tensor, side: str, tiles: Tiles | None, tally: Tally) -> Fields:
    """Seal pages [B, n, H, P, D] with the first backend that does it for this codec."""
    for backend in BACKENDS:
        fields = backend.seal(codec, rows, side, tiles)
        if fields is not None:
            tally.sealed[backend.name] += rows.shape[1]
            return fields
    raise UnsupportedView(f"no backend seals {codec}")


def _choose(view: View, request: Request, name: str | None) -> Backend:
    return _survey(view, request)[0] if name is None else _named(view, request, name)


def _survey(view: View, request: Request | None) -> tuple[Backend, tuple[tuple[str, str], ...]]:
    """The first backend that reads this view, and why those before it do not."""
    refused: list[tuple[str, str]] = []
    for backend in BACKENDS:
        reason = backend.supports(view, request)
        if reason is None:
            return backend, tuple(refused)
        refused.append((backend.name, reason))
    raise UnsupportedView("; ".join(f"{name}: {reason}" for name, reason in refused))


def _named(view: View, request: Request, name: str) -> Backend:
    for backend in BACKENDS:
        if backend.name == name:
            reason = backend.supports(view, request)
            if reason is None:
                return backend
            raise UnsupportedView(f"backend {name!r} does not read this view: {reason}")
    raise ValueError(f"backend {name!r} is not one of {[b.name for b in BACKENDS]}")


def _four_dimensions(mask: Mask | Tensor) -> Mask | Tensor:
    if isinstance(mask, Mask):
        return mask
    return mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))


def _check(q: Tensor, view: View, mask: Mask | Tensor | None, sinks: Tensor | None) -> None:
    """Refuse what does not fit, with both sides in the message."""
    batch, heads, _, dim = view.keys.room.shape
    fits = q.ndim == 4 and (q.shape[0], q.shape[3]) == (batch, dim)
    if not fits or q.shape[1] % heads or q.shape[1] == 0:
        single = "; of one sequence they are q[None]" if q.ndim == 3 else ""
        raise ValueError(
            f"queries of shape {list(q.shape)} do not fit keys of [{batch}, {heads}, ., {dim}]: "
            f"[B, heads, T, D] is needed, heads a multiple of {heads}{single}"
        )
    if q.shape[2] > view.columns:
        raise ValueError(f"{q.shape[2]} queries, but the view has {view.columns} tokens")
    rule = mask if isinstance(mask, Mask) else view.mask
    if not view.serves(view.columns - q.shape[2], rule):
        raise ValueError(
            f"{q.shape[2]} queries under {rule}: rows that the oldest of them sees are not in this "
            "view; use the view that their append returned, and neither a wider window nor more "
            "sinks than its own"
        )
    if q.device != view.keys.room.device:
        raise ValueError(f"queries on {q.device}, rows on {view.keys.room.device}")
    if isinstance(mask, Tensor):
        _check_mask(q, view, mask)
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sink_logits {list(sinks.shape)} for {q.shape[1]} heads: one a head")


def _check_mask(q: Tensor, view: View, mask: Tensor) -> None:
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise ValueError(f"a mask of {mask.dtype}: booleans or floating point numbers are needed")
    lead = [1, 1, *mask.shape][-4:-2]
    fits = mask.ndim in (2, 3, 4) and mask.shape[-2] == q.shape[2] and mask.shape[-1] > 0
    fits = fits and lead[0] in (1, q.shape[0]) and lead[1] in (1, q.shape[1])
    if not fits or mask.shape[-1] > view.columns:
        raise ValueError(
            f"mask {list(mask.shape)} does not fit {q.shape[2]} queries over {view.columns} "
            f"tokens: [{q.shape[0]}, {q.shape[1]}, {q.shape[2]}, n] is needed, n <= {view.columns}"
        )
