"""The part of `kvant doctor` that computes: tests which backends run here and compares them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvant.attention import attend
from kvant.attention.dispatch import BACKENDS
from kvant.cache import Cache
from kvant.contracts import View
from kvant.platform.sizes import format_size
from kvant.weights.packed_matrix import (
    MAX_KERNEL_ROWS,
    PackedMatrix,
    SummationOrder,
    explain_refusal,
)

TESTED_FORMATS = ("raw", "affine8", "affine4", "affine3", "fp8", "turbo4", "turbo3")
HEADS, TOKENS, DIM = 2, 300, 64  # of the test cache


def list_devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _make_view(spec: str, device: str) -> View:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 1, HEADS, TOKENS, DIM, generator=generator).to(device)
    view: View = Cache(1, spec)[0].append(*rows)
    return view


def explain_backends(device: str) -> dict[str, str | None]:
    """Return why each backend does not support affine4 rows on a device; None if it does."""
    view = _make_view("affine4", device)
    return {backend.name: backend.supports(view, None) for backend in BACKENDS}


def compare_backends(device: str) -> Iterator[dict[str, Any]]:
    """Yield the largest difference of each fast backend from the reference, for each format."""
    queries = torch.randn(1, 2 * HEADS, 1, DIM, generator=torch.Generator().manual_seed(1))
    queries = queries.to(device)
    for spec in TESTED_FORMATS:
        view = _make_view(spec, device)
        expected = attend(queries, view, backend="reference")
        for backend in BACKENDS[:2]:
            if backend.supports(view, None) is None:
                output = attend(queries, view, backend=backend.name)
                yield {
                    "format": spec,
                    "device": device,
                    "backend": backend.name,
                    "difference": (output - expected).abs().max().item(),
                }


def describe_packing() -> str:
    """Describe how `kvant.pack` packs bfloat16 weights on this machine."""
    if (reason := explain_refusal(torch.bfloat16)) is not None:
        return f"no: {reason}"
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    matrix = PackedMatrix(weight.bfloat16(), SummationOrder())
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
        return f"none found by torch {torch.__version__}"
    gpus = (torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count()))
    return ", ".join(f"{gpu.name}, {format_size(gpu.total_memory)}" for gpu in gpus)
