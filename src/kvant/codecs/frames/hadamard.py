"""A signed fast Hadamard transform: it spreads an outlier evenly over the channels of its row.

A = H diag(s) / sqrt(n), with signs s that depend on (seed, dim) alone. A dim that is no power of
two falls into blocks, the largest first (80 = 64 + 16), each rotated on its own. A is orthogonal.

The result for a row is the same, bit for bit, whatever rows lie beside it: the butterfly is
elementwise additions in one fixed order, neighbours first. It knows no head and no position.
The library computes it in that order too, and on a GPU a kernel; what neither serves, torch does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from kvant.native import SignArray, can_rotate, is_kernel_readable, rotate_rows
from kvant.torch_modes import no_inference_mode
from kvant.triton_runtime import get_compiled_flags, is_triton_installed, use_device

UINT64_MASK = 2**64 - 1
SPLITMIX64_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the step of SplitMix64


@dataclass(frozen=True)
class Rotation:
    """Computes in float32 (float64 for float64) and rounds once, to the dtype that came."""

    seed: int = 0
    name: ClassVar[str] = "rotation"
    is_identity: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed is {self.seed!r}; it must be an integer")
        if not 0 <= self.seed <= UINT64_MASK:
            raise ValueError(f"seed is {self.seed}; it must lie in [0, 2**64)")

    def transform_rows(self, x: Tensor) -> Tensor:
        return self._rotate(x, x.dtype, signs_last=False)

    def transform_queries(self, q: Tensor) -> Tensor:
        return self._rotate(q, _get_compute_dtype(q.dtype), signs_last=False)

    def restore_outputs(self, x: Tensor) -> Tensor:
        return self._rotate(x, x.dtype, signs_last=True)

    def _rotate(self, x: Tensor, dtype: torch.dtype, *, signs_last: bool) -> Tensor:
        """The signs come before the transform, or last; either way each product is rounded."""
        if can_launch(x):
            return launch_rotation(x, self._get_signs, dtype, signs_last=signs_last)
        if x.dtype != dtype:
            x = x.to(dtype)
        if can_rotate(x):
            return rotate_rows(x, _make_native_signs(self.seed, x.shape[-1]), signs_last=signs_last)
        wide = x.to(_get_compute_dtype(dtype))
        signs = self._get_signs(wide)
        wide = _transform(wide) * signs if signs_last else _transform(wide * signs)
        return wide.to(dtype)

    def _get_signs(self, x: Tensor) -> Tensor:
        # What a mode makes of other tensors ends with it, and must not be kept.
        made = _make_scaled_signs if type(x) is Tensor else _make_scaled_signs.__wrapped__
        return made(self.seed, x.shape[-1], _get_compute_dtype(x.dtype), x.device)


def split_into_blocks(dim: int) -> list[int]:
    """The powers of two that `dim` is made of, largest first."""
    return [1 << bit for bit in reversed(range(dim.bit_length())) if dim >> bit & 1]


def make_signs(seed: int, dim: int) -> list[int]:
    """`dim` values of +1 or -1: the top bits of a SplitMix64 stream started at (seed, dim).

    Files depend on this stream; it must never change.
    """
    stream = splitmix64(next(splitmix64(seed)) + dim)
    return [1 if next(stream) >> 63 else -1 for _ in range(dim)]


def splitmix64(state: int) -> Iterator[int]:
    """Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014)."""
    while True:
        state = (state + SPLITMIX64_STEP) & UINT64_MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & UINT64_MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & UINT64_MASK
        yield z ^ (z >> 31)


@lru_cache(maxsize=256)
def _make_scaled_signs(seed: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with no_inference_mode():
        return torch.tensor(_scale_signs(seed, dim), dtype=dtype, device=device)


@lru_cache(maxsize=256)
def _make_native_signs(seed: int, dim: int) -> SignArray:
    return (ctypes.c_float * dim)(*_scale_signs(seed, dim))


def _scale_signs(seed: int, dim: int) -> list[float]:
    sizes = [size for size in split_into_blocks(dim) for _ in range(size)]
    return [s * size**-0.5 for s, size in zip(make_signs(seed, dim), sizes, strict=True)]


def _get_compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _transform(x: Tensor) -> Tensor:
    """H x, block by block."""
    sizes = split_into_blocks(x.shape[-1])
    parts = [_apply_butterfly(part) for part in torch.split(x, sizes, dim=-1)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _apply_butterfly(x: Tensor) -> Tensor:
    size = x.shape[-1]
    # The product with +-1 is exact, so one fused operation serves for sum and difference.
    # Made where it is needed: a captured step must hold no copy to the device.
    sign = torch.arange(1, -2, -2, dtype=x.dtype, device=x.device)[:, None]
    y = x.reshape(-1, size)
    for _ in range(size.bit_length() - 1):
        even, odd = y.view(-1, 1, size // 2, 2).unbind(-1)
        y = torch.addcmul(even, odd, sign)
    return y.view(x.shape)


ROWS_PER_PROGRAM = 4  # a program, which is one warp: what lanes exchange waits for no others


def can_launch(x: Tensor) -> bool:
    """Whether `launched` serves this: rows on a GPU where the kernel runs."""
    return x.is_cuda and is_kernel_readable(x) and _can_run_kernel()


def launch_rotation(
    x: Tensor, get_signs: Callable[[Tensor], Tensor], dtype: torch.dtype, *, signs_last: bool
) -> Tensor:
    """Rows [B, H, T, D] turned, multiplied by the D signs for them before that, or last.

    Nothing is copied to the device and nothing waits for it, so a launch can be captured. Signs are
    kept by whoever gives them, so they are asked for where memory is memory.
    """
    from kvant.codecs.frames.rotation_kernel import rotate

    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    assert type(out) is Tensor, "rows that are there, in a mode whose tensors are not"
    batch, heads, count, dim = x.shape
    rows = batch * heads * count
    if rows == 0:
        return out
    with use_device(x.device):
        rotate[-(-rows // ROWS_PER_PROGRAM),](
            *(x, get_signs(x), out, *x.stride()[:3], rows, heads, count),
            DIM=dim,
            SIGNS_LAST=signs_last,
            ROWS=ROWS_PER_PROGRAM,
            num_warps=1,
            enable_fp_fusion=False,  # which rounds otherwise than torch does
        )
    return out


@lru_cache(maxsize=1)
def _can_run_kernel() -> bool:
    """Can the kernel run on a GPU?"""
    if not is_triton_installed():
        return False
    from kvant.codecs.frames.rotation_kernel import rotate

    return get_compiled_flags(rotate) == {True}
