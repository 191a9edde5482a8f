"""The backend for GPUs: Triton kernels on the stored bytes.

It reads raw rows, affine pages of 8 and 4 bits and codebook pages, keys and values each in their
own, all queries of a key head in one pass over its rows, and sequences of any lengths in one
launch; it writes rows to their pages and seals them; and says of everything else why not. Pages lie
as files have them: those of a head are contiguous, and their bytes are loaded 16 at a time.

Triton is optional, and nothing of it is imported before pages are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvant.attention.selecting import choose
from kvant.attention.triton.forms import DTYPES, MAX_DIM, laid, unread
from kvant.attention.triton.launching import BLOCK, NARROW, Scope, available, launch, shared
from kvant.attention.triton.sealing import stored, unstored
from kvant.contracts import Fields, Mask, Request, Stored, View
from kvant.extent import Change
from kvant.launches import compiled, installed

PLAIN = (Tensor, torch.nn.Parameter)  # others may have no memory


@dataclass(frozen=True)
class Triton:
    """Stores rows and attends over pages on a GPU, or on the CPU in Triton's interpreter."""

    name: str = "triton"
    device: str = "cuda"
    prompts: bool = False

    def supports(self, pages: View, request: Request | None = None) -> str | None:
        if pages.keys.open.device.type != self.device:
            return f"rows on {pages.keys.open.device}"
        if (reason := _missing(self.device)) is not None:
            return reason
        if pages.values is pages.keys:
            return "values that lie inside the keys"
        for name, side in (("keys", pages.keys), ("values", pages.values)):
            if (reason := _refused(side, name, pages)) is not None:
                return reason
        both = pages.keys.open, pages.values.open
        least, room = shared(*both, NARROW, 1), available(both[0].device)
        if least > room:
            return f"rows that take {least} bytes of shared memory: {room} are there"
        return None if request is None else _asks_too_much(request)

    def choose(self, request: Request, view: View) -> Tensor | None:
        return choose(request, view)

    def attend(self, request: Request, pages: View) -> tuple[Tensor, Tensor | None]:
        return launch(request, Scope.of(pages, request.chosen))

    def store(self, change: Change, rows: Fields, sides: Mapping[str, Stored]) -> bool:
        """Copy, write and seal; False where these rows, or what they are sealed to, are others'."""
        if any(side.open.device.type != self.device for side in sides.values()):
            return False
        if _missing(self.device) is not None or unstored(change, rows, sides):
            return False
        stored(change, rows, sides)
        return True


def _missing(device: str) -> str | None:
    """Why the kernels cannot run on such a device."""
    if not installed():
        return "triton is not installed: pip install 'kvant[gpu]'"
    if _compiled() == {device != "cpu"}:
        return None
    if device == "cpu":
        return "the interpreter is off: set TRITON_INTERPRET=1 before anything imports triton"
    return "the interpreter is on: unset TRITON_INTERPRET before anything imports triton"


@lru_cache(maxsize=1)
def _compiled() -> set[bool]:
    from kvant.attention.triton.kernels.attend import attend

    return compiled(attend)


def _refused(side: Stored, name: str, pages: View) -> str | None:
    rows, dim = side.open, side.open.shape[3]
    if type(rows) is not Tensor:
        return f"{name} in a {type(rows).__name__}"
    if (reason := unread(side.codec)) is not None:
        return f"{name} of {reason}"
    if dim % 16 or dim > MAX_DIM:
        return f"{name} {dim} wide: a multiple of 16 up to {MAX_DIM} is needed"
    if (reason := laid(name, rows)) is not None:
        return reason
    if side.sealed and pages.extent.kind.page % BLOCK:
        return f"pages of {pages.extent.kind.page} rows: a multiple of {BLOCK} is needed"
    if "codes" in side.sealed and side.tiles is not None:
        return "sealed pages that lie otherwise"
    own = rows if pages.own is None else pages.own[name]
    if own.dtype != rows.dtype or type(own) not in PLAIN:
        return f"{name} that came as a {type(own).__name__} of {own.dtype}"
    return None


def _asks_too_much(request: Request) -> str | None:
    if type(request.q) not in PLAIN:
        return f"queries in a {type(request.q).__name__}"
    if (reason := laid("queries", request.q)) is not None:
        return reason
    if request.out_dtype not in DTYPES:
        return f"outputs of {request.out_dtype}"
    if not isinstance(request.mask, Mask):
        return "a mask that is a tensor"
    return None
