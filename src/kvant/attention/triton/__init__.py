"""The GPU backend: Triton kernels that read the stored bytes.

It stores and seals rows, and reads raw rows, affine pages of 8 and 4 bits, and codebook pages. Keys
and values may have different codecs. One launch serves sequences of any lengths; one pass over the
rows serves all queries of a key head. `supports` returns the reason for each view that the backend
refuses. Pages are in the canonical order of files: a page of one head is contiguous, and kernels
load 16 bytes at a time.

Triton is optional. It is imported when this backend is first asked to store or read rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvant.attention.page_selection import select_pages
from kvant.attention.triton.arguments import (
    DTYPES,
    MAX_DIM,
    explain_unloadable_rows,
    explain_unsupported_codec,
)
from kvant.attention.triton.kernel_launch import (
    BLOCK_ROWS,
    MIN_TILE_QUERIES,
    KernelView,
    compute_shared_bytes,
    get_available_shared_bytes,
    launch_attention,
)
from kvant.attention.triton.store_pages import is_unsupported_plan, launch_store
from kvant.contracts import AttentionRequest, Fields, Mask, PagedTensors, View
from kvant.page_table import AppendPlan
from kvant.platform.torch_runtime import get_compiled_flags, is_triton_installed

PLAIN_TENSOR_TYPES = (Tensor, torch.nn.Parameter)  # subclasses may have no storage


@dataclass(frozen=True)
class TritonBackend:
    """Attention and storage on a GPU, or on the CPU in Triton's interpreter."""

    name: str = "triton"
    device: str = "cuda"
    fast_prefill: bool = False

    def supports(self, view: View, request: AttentionRequest | None = None) -> str | None:
        if view.keys.open.device.type != self.device:
            return f"rows on {view.keys.open.device}"
        if (reason := _explain_unavailable(self.device)) is not None:
            return reason
        if view.values is view.keys:
            return "values stored inside the keys"
        for name, side in (("keys", view.keys), ("values", view.values)):
            if (reason := _explain_unsupported_side(side, name, view)) is not None:
                return reason
        keys, values = view.keys.open, view.values.open
        needed = compute_shared_bytes(keys, values, MIN_TILE_QUERIES)
        available = get_available_shared_bytes(keys.device)
        if needed > available:
            return f"rows need {needed} bytes of shared memory: the device has {available}"
        return None if request is None else _explain_unsupported_request(request)

    def select_pages(self, request: AttentionRequest, view: View) -> Tensor | None:
        return select_pages(request, view)

    def attend(self, request: AttentionRequest, view: View) -> tuple[Tensor, Tensor | None]:
        return launch_attention(request, KernelView.from_view(view, request.selected_pages))

    def store(self, plan: AppendPlan, rows: Fields, sides: Mapping[str, PagedTensors]) -> bool:
        """Apply `plan` to the new rows; return False, with nothing written, if unsupported."""
        if any(side.open.device.type != self.device for side in sides.values()):
            return False
        if _explain_unavailable(self.device) is not None or is_unsupported_plan(plan, rows, sides):
            return False
        launch_store(plan, rows, sides)
        return True


def _explain_unavailable(device: str) -> str | None:
    """Return why the kernels cannot run on this type of device, or None."""
    if not is_triton_installed():
        return "triton is not installed: pip install 'kvant[gpu]'"
    if _get_compiled_flags() == {device != "cpu"}:  # GPU: all compiled; CPU: all interpreted
        return None
    if device == "cpu":
        return "the interpreter is off: set TRITON_INTERPRET=1 before anything imports triton"
    return "the interpreter is on: unset TRITON_INTERPRET before anything imports triton"


@lru_cache(maxsize=1)
def _get_compiled_flags() -> set[bool]:
    from kvant.attention.triton.kernels.attend import attend

    return get_compiled_flags(attend)


def _explain_unsupported_side(tensors: PagedTensors, name: str, view: View) -> str | None:
    rows, dim = tensors.open, tensors.open.shape[3]
    if type(rows) is not Tensor:
        return f"{name} in a {type(rows).__name__}"
    if (reason := explain_unsupported_codec(tensors.codec)) is not None:
        return f"{name} of {reason}"
    if dim % 16 or dim > MAX_DIM:
        return f"{name} {dim} wide: a multiple of 16 up to {MAX_DIM} is needed"
    if (reason := explain_unloadable_rows(name, rows)) is not None:
        return reason
    page = view.page_table.layer_group.page
    if tensors.sealed and page % BLOCK_ROWS:
        return f"pages of {page} rows: a multiple of {BLOCK_ROWS} is needed"
    if "codes" in tensors.sealed and tensors.tiles is not None:
        return "sealed pages in another arrangement"
    new_rows = rows if view.new_rows is None else view.new_rows[name]
    if new_rows.dtype != rows.dtype or type(new_rows) not in PLAIN_TENSOR_TYPES:
        return f"new {name} in a {type(new_rows).__name__} of {new_rows.dtype}"
    return None


def _explain_unsupported_request(request: AttentionRequest) -> str | None:
    if type(request.q) not in PLAIN_TENSOR_TYPES:
        return f"queries in a {type(request.q).__name__}"
    if (reason := explain_unloadable_rows("queries", request.q)) is not None:
        return reason
    if request.out_dtype not in DTYPES:
        return f"outputs of {request.out_dtype}"
    if not isinstance(request.mask, Mask):
        return "an explicit mask tensor"
    return None
