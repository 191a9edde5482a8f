"""The backend for CPUs: C++ on the stored bytes, behind a plain C interface.

It reads raw rows, affine, codebook and fp8 pages, all queries of a key head in one pass over its
rows, and says of everything else why not. Sealed pages must lie as `Lanes` says.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvant.attention.native.interface import FORMS, form, record
from kvant.attention.native.lanes import Lanes
from kvant.attention.native.sealing import sealed
from kvant.contracts import Codec, Fields, Mask, Request, Side, Tiles, View
from kvant.native import DTYPES, done, library

__all__ = ["Native", "arrangement"]

MAX_DIM, MAX_GROUP, BLOCK = 256, 16, 64  # of the kernels

LANES = Lanes()
PLAIN = (Tensor, torch.nn.Parameter)  # others may have no memory
UNEVEN = (3, 5)  # bits whose planes need rows of whole 32 channels


class Native:
    """Seals pages and attends over views with the compiled kernels."""

    name = "native"

    def supports(self, view: View, request: Request | None = None) -> str | None:
        if view.start.device.type != "cpu":
            return f"rows on {view.start.device}"
        if library().functions is None:
            return library().reason
        if view.values is view.keys:
            return "values that lie inside the keys"
        for name, side in (("keys", view.keys), ("values", view.values)):
            if (reason := _refused(side, name, view)) is not None:
                return reason
        return None if request is None else _asks_too_much(request, view)

    def seal(self, codec: Codec, rows: Tensor, side: str, tiles: Tiles | None) -> Fields | None:
        functions = library().functions
        if functions is None or rows.device.type != "cpu" or type(codec) not in FORMS:
            return None
        if type(rows) is not Tensor:
            return None
        return sealed(functions, codec, rows, side, tiles)

    def attend(self, request: Request, view: View) -> tuple[Tensor, Tensor | None]:
        functions = library().functions
        assert functions is not None
        q = request.q
        batch, heads, queries, _ = q.shape
        shape = (batch, heads, queries, view.values.room.shape[3])
        out = torch.empty(shape, dtype=request.dtype, device=q.device)
        assert type(out) is Tensor, "rows that are there, in a mode whose tensors are not"
        lse = out.new_empty(shape[:3], dtype=torch.float32) if request.lse else None
        if request.sink_logits is not None:
            request = replace(request, sink_logits=request.sink_logits.float().contiguous())
        given = record(request, view, out, lse, torch.get_num_threads())
        done(functions.kvant_attend(given))
        return out, lse


def arrangement(device: torch.device) -> Tiles | None:
    """How sealed pages are to lie in the memory of this device, so that they are read fastest."""
    native = device.type == "cpu" and library().functions is not None
    return LANES if native else None


def _refused(side: Side, name: str, view: View) -> str | None:
    room, codec = side.room, side.codec
    dim = room.shape[3]
    if type(room) is not Tensor:
        return f"{name} in a {type(room).__name__}"
    if type(codec) not in FORMS:
        return f"{name} of {type(codec).__name__}"
    if dim % 16 or dim > MAX_DIM:
        return f"{name} {dim} wide: a multiple of 16 up to {MAX_DIM} is needed"
    if room.dtype not in DTYPES or room.stride(3) != 1:
        return f"{name} of {room.dtype}, or not contiguous"
    if side.sealed and view.page % BLOCK:
        return f"pages of {view.page} rows: a multiple of {BLOCK} is needed"
    if "codes" not in side.sealed:
        return None
    if dim % 32 and (bits := form(codec, dim)[1]) in UNEVEN:
        return f"{name} of {bits} bits, {dim} wide: a multiple of 32 is needed"
    if view.tiles != LANES:
        return "sealed pages that lie otherwise"
    return None


def _asks_too_much(request: Request, view: View) -> str | None:
    group = request.q.shape[1] // view.keys.room.shape[1]
    if type(request.q) not in PLAIN:
        return f"queries in a {type(request.q).__name__}"
    if group > MAX_GROUP:
        return f"{group} queries share a key head: {MAX_GROUP} at most"
    if request.q.dtype not in DTYPES or request.dtype not in DTYPES or request.q.stride(3) != 1:
        return f"queries of {request.q.dtype}, or not contiguous"
    if not isinstance(request.mask, Mask):
        return "a mask that is a tensor"
    return None
