"""The backend for GPUs: Triton kernels on the stored bytes.

It reads raw rows, affine pages of 8 and 4 bits and codebook pages, keys and values each in their
own, all queries of a key head in one pass over its rows; and says of everything else why not. Pages
lie as files have them: those of a head are contiguous, and their bytes are loaded 16 at a time.

Triton is optional, and nothing of it is imported before a view is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvant.attention.triton.forms import DTYPES, MAX_DIM, unread
from kvant.attention.triton.launching import BLOCK, NARROW, available, launch, shared
from kvant.attention.triton.sealing import sealed, unsealed
from kvant.contracts import Codec, Fields, Mask, Request, Side, Tiles, View
from kvant.launches import compiled, installed

PLAIN = (Tensor, torch.nn.Parameter)  # others may have no memory


@dataclass(frozen=True)
class Triton:
    """Seals pages and attends over views on a GPU, or on the CPU in Triton's interpreter."""

    name: str = "triton"
    device: str = "cuda"

    def supports(self, view: View, request: Request | None = None) -> str | None:
        if view.start.device.type != self.device:
            return f"rows on {view.start.device}"
        if (reason := _missing(self.device)) is not None:
            return reason
        if view.values is view.keys:
            return "values that lie inside the keys"
        for name, side in (("keys", view.keys), ("values", view.values)):
            if (reason := _refused(side, name, view)) is not None:
                return reason
        least, room = shared(view, NARROW, 1), available(view.start.device)
        if least > room:
            return f"rows that take {least} bytes of shared memory: {room} are there"
        return None if request is None else _asks_too_much(request)

    def seal(self, codec: Codec, rows: Tensor, side: str, tiles: Tiles | None) -> Fields | None:
        if rows.device.type != self.device or _missing(self.device) is not None:
            return None
        if tiles is not None or unsealed(codec, rows):
            return None
        return sealed(codec, rows)

    def attend(self, request: Request, view: View) -> tuple[Tensor, Tensor | None]:
        return launch(request, view)


def _missing(device: str) -> str | None:
    """Why the kernels cannot run on such a device."""
    if not installed():
        return "triton is not installed: pip install kvant[gpu]"
    if _compiled() == {device != "cpu"}:
        return None
    if device == "cpu":
        return "the interpreter is off: set TRITON_INTERPRET=1 before anything imports triton"
    return "the interpreter is on: unset TRITON_INTERPRET before anything imports triton"


@lru_cache(maxsize=1)
def _compiled() -> set[bool]:
    from kvant.attention.triton.kernels.attend import attend

    return compiled(attend)


def _refused(side: Side, name: str, view: View) -> str | None:
    room, dim = side.room, side.room.shape[3]
    if type(room) is not Tensor:
        return f"{name} in a {type(room).__name__}"
    if (reason := unread(side.codec)) is not None:
        return f"{name} of {reason}"
    if dim % 16 or dim > MAX_DIM:
        return f"{name} {dim} wide: a multiple of 16 up to {MAX_DIM} is needed"
    if (reason := _laid(name, room)) is not None:
        return reason
    if side.sealed and view.page % BLOCK:
        return f"pages of {view.page} rows: a multiple of {BLOCK} is needed"
    if "codes" in side.sealed and view.tiles is not None:
        return "sealed pages that lie otherwise"
    return None


def _asks_too_much(request: Request) -> str | None:
    if type(request.q) not in PLAIN:
        return f"queries in a {type(request.q).__name__}"
    if (reason := _laid("queries", request.q)) is not None:
        return reason
    if request.dtype not in DTYPES:
        return f"outputs of {request.dtype}"
    if not isinstance(request.mask, Mask):
        return "a mask that is a tensor"
    return None


def _laid(name: str, rows: Tensor) -> str | None:
    """Why the values of these rows cannot be loaded."""
    if rows.dtype not in DTYPES:
        return f"{name} of {rows.dtype}"
    if rows.stride(3) != 1:
        return f"{name} with a stride of {rows.stride(3)} from channel to channel: 1 is needed"
    return None
