"""Select the backend for a view and run attention with it.

Backends are a plain list in order of preference. A view that a requested backend does not support
raises UnsupportedView; there is no silent fallback.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from kvant.attention.length_groups import has_visible_rows
from kvant.attention.native import NativeBackend
from kvant.attention.reference import ReferenceBackend
from kvant.attention.triton import TritonBackend
from kvant.contracts import AttentionRequest, Backend, Mask, View
from kvant.errors import RenamedAttribute, UnsupportedView
from kvant.lazy import Memo
from kvant.platform.torch_runtime import get_transform, make_transform_error

# In order of preference. The reference backend supports every view, so the backends after it run
# only when requested by name.
BACKENDS: list[Backend] = [
    NativeBackend(),
    TritonBackend(),
    ReferenceBackend(),
    ReferenceBackend("dequantize", max_opened_values=sys.maxsize),
    TritonBackend("interpreted", device="cpu"),
]
# The backends that read a layer's pages, by the properties of a request that they depend on.
ReaderKey = tuple[str | None, type, torch.dtype, torch.dtype, int, int, type]
READERS: Memo[dict[ReaderKey, Backend]] = Memo("readers")


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
) -> Any:
    """Compute attention of `q` [B, heads, T, D], the newest T columns: [B, heads, T, Dv].

    An explicit `mask` tensor (booleans, True = visible, or floats to add to the scores) replaces
    the view's mask. Its last column is the newest token; columns before its first one, and evicted
    rows, are masked. `softcap=0` means no cap. No gradients are recorded.

    >>> keys, values = torch.randn(1, 2, 10, 64), torch.randn(1, 2, 10, 64)
    >>> view = kvant.Cache(1, "affine8")[0].append(keys, values)
    >>> kvant.attend(torch.randn(1, 8, 1, 64), view).shape
    torch.Size([1, 8, 1, 64])
    """
    if get_transform() is not None:
        raise make_transform_error("attend")
    _check_queries(q, view, mask, sink_logits)
    softcap = softcap or None
    if view.query_listener is not None:
        factor = q.shape[3] ** -0.5 if scale is None else scale
        effective_mask = view.mask if mask is None else mask
        view.query_listener(AttentionRequest(q, factor, effective_mask, softcap, sink_logits))
    if view.page_table.tables_per_sequence > 1:
        options = {"scale": scale, "softcap": softcap, "backend": backend}
        outputs = _attend_by_head(q, view, mask, sink_logits, **options)
        return outputs if return_lse else outputs[0]
    with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
        keys, frame = view.keys, view.values.codec.frame
        scale = q.shape[3] ** -0.5 if scale is None else scale
        rule = _expand_mask_dims(mask) if isinstance(mask, Tensor) else mask or view.mask
        framed = q if keys.codec.frame.is_identity else keys.codec.frame.transform_queries(q)
        # Outputs that a frame still has to transform stay in float32 until then.
        dtype = q.dtype if frame.is_identity else torch.float32
        request = AttentionRequest(framed, scale, rule, softcap, sink_logits, return_lse, dtype)
        # Without new rows the choice is the same for every token of a layer: cache it.
        cacheable, name = view.new_rows is None, backend or view.backend
        key = (name, type(q), framed.dtype, dtype, q.shape[1], q.stride(3), type(rule))
        readers = keys.derived.setdefault(READERS, {})
        reader = readers.get(key) if cacheable else None
        if reader is None:
            reader = _select_backend(view, request, name)[0]
            if cacheable:
                readers[key] = reader
        if view.selection is not None and isinstance(rule, Mask):
            request = request._replace(selected_pages=reader.select_pages(request, view))
        out, lse = reader.attend(request, view)
        view.stats.attend_calls[reader.name] += 1
        if not frame.is_identity:
            out = frame.restore_outputs(out)
        if view.values.dim > view.value_dim:
            out = out[..., : view.value_dim]
        out = out if out.dtype == q.dtype else out.to(q.dtype)
        return out if lse is None else (out, lse)


def _attend_by_head(
    q: Tensor, view: View, mask: Mask | Tensor | None, sink_logits: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Compute attention over page tables per key head, each read like a sequence of its own."""
    if isinstance(mask, Tensor):
        mask = _split_mask_by_head(view, _expand_mask_dims(mask))
    table = view.page_table.flat_table
    flat_view = view._replace(
        page_table=table, batch=table.batch, heads=view.keys.heads, query_listener=None
    )
    queries = q.reshape(view.page_table.num_tables, -1, *q.shape[2:])
    out, lse = attend(queries, flat_view, mask=mask, return_lse=True, **options)
    out, lse = out.reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3])
    if sink_logits is None:
        return out, lse
    sink = sink_logits.to(lse.dtype)[:, None]  # adds to the denominator of the softmax alone
    out = out * torch.sigmoid(lse - sink).unsqueeze(-1).to(out.dtype)
    return out, torch.logaddexp(lse, sink)


def _split_mask_by_head(view: View, mask: Tensor) -> Tensor:
    """Reshape a mask [B or 1, heads or 1, T, n] to one mask per key head."""
    if mask.shape[1] > 1:
        mask = mask.expand(view.batch, -1, -1, -1)
        return mask.reshape(view.page_table.num_tables, -1, *mask.shape[2:])
    if mask.shape[0] == 1:
        return mask
    return mask.repeat_interleave(view.page_table.tables_per_sequence, 0)


@dataclass(frozen=True)
class BackendExplanation:
    """The backend that reads a view, and why the preferred ones before it do not."""

    backend: str
    refusals: tuple[tuple[str, str], ...]

    refused = RenamedAttribute("refusals")

    def __str__(self) -> str:
        lines = [f"{self.backend}: reads this view"]
        return "\n".join(lines + [f"not {name}: {reason}" for name, reason in self.refusals])


@singledispatch
def explain(view: Any) -> Any:
    """Explain which backend reads a view and why the preferred ones do not.

    For a cache, a session or a model, the explanation goes layer by layer.
    """
    name = view.__name__ if isinstance(view, type) else type(view).__name__
    raise TypeError(
        f"{name} cannot be explained: give a view, a cache, a session, or a model of transformers"
    )


@explain.register
def _(view: View) -> BackendExplanation:
    backend, refusals = _select_backend(view, None, view.backend)
    return BackendExplanation(backend.name, refusals)


def has_fast_prefill(view: View, q: Tensor | None = None) -> bool:
    """Tell whether a backend attends to new rows faster than PyTorch's own attention does."""
    if not (view.keys.codec.frame.is_identity and view.values.codec.frame.is_identity):
        return False
    request = None
    if q is not None:
        request = AttentionRequest(q, 1.0, view.mask, return_lse=False, output_dtype=q.dtype)
    return any(
        backend.fast_prefill
        and view.backend in (None, backend.name)
        and backend.supports(view, request) is None
        for backend in BACKENDS
    )


def _select_backend(
    view: View, request: AttentionRequest | None, name: str | None
) -> tuple[Backend, tuple[tuple[str, str], ...]]:
    """Return the first backend that supports this view, and why those before it do not."""
    check_backend(name)
    refusals: list[tuple[str, str]] = []
    for backend in BACKENDS:
        if name in (None, backend.name):
            reason = backend.supports(view, request)
            if reason is None:
                return backend, tuple(refusals)
            refusals.append((backend.name, reason))
    if name is not None:
        raise UnsupportedView(f"backend {name!r} does not read this view: {refusals[0][1]}")
    raise UnsupportedView("; ".join(f"{name}: {reason}" for name, reason in refusals))


def check_backend(name: str | None) -> None:
    """Raise ValueError unless a backend has this name."""
    names = [backend.name for backend in BACKENDS]
    if name is not None and name not in names:
        raise ValueError(f"backend {name!r} is not one of {names}")


def _expand_mask_dims(mask: Tensor) -> Tensor:
    return mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))


def _check_queries(
    q: Tensor, view: View, mask: Mask | Tensor | None, sink_logits: Tensor | None
) -> None:
    """Raise ValueError for queries, masks or sink logits that do not fit the view."""
    batch, shape = view.batch, q.shape
    heads, dim, device = view.heads, view.keys.dim, view.keys.open.device
    fits = len(shape) == 4 and shape[0] == batch and shape[3] == dim
    if not fits or shape[1] % heads or shape[1] == 0:
        hint = "; for one sequence pass q[None]" if q.ndim == 3 else ""
        raise ValueError(
            f"queries of shape {list(q.shape)} do not fit keys of [{batch}, {heads}, ., {dim}]: "
            f"[B, heads, T, D] is needed, heads a multiple of {heads}{hint}"
        )
    if q.device != device:
        raise ValueError(f"queries on {q.device}, but the cache is on {device}")
    if sink_logits is not None and sink_logits.shape != (q.shape[1],):
        raise ValueError(
            f"sink_logits of shape {list(sink_logits.shape)} for {q.shape[1]} heads: "
            "one per head is needed"
        )
    if mask is not None or shape[2] != 1:
        _check_visible_rows(q, view, mask)


def _check_visible_rows(q: Tensor, view: View, mask: Mask | Tensor | None) -> None:
    """Raise an error for queries that see rows which the view no longer has."""
    columns = view.page_table.num_columns
    if q.shape[2] > columns:
        raise ValueError(f"{q.shape[2]} queries, but the view has {columns} tokens")
    rule = mask if isinstance(mask, Mask) else view.mask
    if not has_visible_rows(view, q.shape[2], rule):
        raise ValueError(
            f"{q.shape[2]} queries under {rule}: this view lacks rows that the oldest query sees; "
            "use the view that their append returned, with no wider window and no more sinks than "
            "the view's"
        )
    if isinstance(mask, Tensor):
        _check_mask(q, columns, mask)
        if view.page_table.pruned_at.any():
            raise UnsupportedView(
                "a mask tensor counts columns, but pruned layers no longer have a row per column: "
                "pass padding as start= or attention_mask= instead"
            )


def _check_mask(q: Tensor, columns: int, mask: Tensor) -> None:
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise ValueError(f"a mask of {mask.dtype}: booleans or floating point numbers are needed")
    leading = [1, 1, *mask.shape][-4:-2]
    fits = mask.ndim in (2, 3, 4) and mask.shape[-2] == q.shape[2] and mask.shape[-1] > 0
    fits = fits and leading[0] in (1, q.shape[0]) and leading[1] in (1, q.shape[1])
    if not fits or mask.shape[-1] > columns:
        raise ValueError(
            f"mask of shape {list(mask.shape)} does not fit {q.shape[2]} queries over {columns} "
            f"tokens: [{q.shape[0]}, {q.shape[1]}, {q.shape[2]}, n] is needed, n <= {columns}"
        )
