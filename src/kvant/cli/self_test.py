"""What `kvant doctor` finds out by computing: which backends run here, and how well they agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvant.attention import attend
from kvant.attention.dispatch import BACKENDS
from kvant.cache import Cache
from kvant.contracts import View
from kvant.packed_matrix import MAX_KERNEL_ROWS, PackedMatrix, SummationOrder, explain_refusal
from kvant.sizes import format_size

TESTED_FORMATS = ("raw", "affine8", "affine4", "affine3", "fp8", "turbo4", "turbo3")
HEADS, TOKENS, DIM = 2, 300, 64


def list_devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _make_view(spec: str, device: str) -> View:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 1, HEADS, TOKENS, DIM, generator=generator).to(device)
    made: View = Cache(1, spec)[0].append(*rows)
    return made


def explain_backends(device: str) -> dict[str, str | None]:
    """Why each does not read affine4 rows there; None of those that do."""
    view = _make_view("affine4", device)
    return {one.name: one.supports(view, None) for one in BACKENDS}


def compare_backends(device: str) -> Iterator[dict[str, Any]]:
    """How far each fast backend is from the reference."""
    q = torch.randn(1, 2 * HEADS, 1, DIM, generator=torch.Generator().manual_seed(1)).to(device)
    for spec in TESTED_FORMATS:
        view = _make_view(spec, device)
        right = attend(q, view, backend="reference")
        for one in BACKENDS[:2]:
            if one.supports(view, None) is None:
                apart = (attend(q, view, backend=one.name) - right).abs().max().item()
                yield {"format": spec, "device": device, "backend": one.name, "difference": apart}


def describe_packing() -> str:
    """What `kvant.pack` does with weights in bfloat16 here."""
    if (reason := explain_refusal(torch.bfloat16)) is not None:
        return f"no: {reason}"
    drawn = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    matrix = PackedMatrix(drawn.bfloat16(), SummationOrder())
    kernel = matrix.find_kernel_k_block(torch.ones(1, 256).bfloat16(), None)
    return (
        f"yes, and up to {MAX_KERNEL_ROWS} rows by our kernel"
        if kernel
        else "yes, computed by oneDNN"
    )


def describe_gpu() -> str:
    if torch.version.cuda is None:
        return f"none: torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return f"none that torch {torch.__version__} finds"
    found = (torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count()))
    return ", ".join(f"{one.name}, {format_size(one.total_memory)}" for one in found)
