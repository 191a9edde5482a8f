"""The rotation frame: a signed fast Hadamard transform that spreads outliers over all channels.

A = H diag(s) / sqrt(n), with signs s that depend on (seed, dim) alone. A is orthogonal. A dim that
is no power of two is split into blocks, the largest first (80 = 64 + 16), each rotated separately.

The result for a row does not depend on other rows, to the bit: the butterfly is elementwise
additions in one fixed order, neighbouring channels first. The same rotation applies to all heads
and positions. The C++ library and a Triton kernel compute it in the same order; torch computes
whatever neither supports.
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
from kvant.platform.torch_runtime import (
    get_compiled_flags,
    is_triton_installed,
    no_inference_mode,
    use_device,
)

UINT64_MASK = 2**64 - 1
SPLITMIX64_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio


@dataclass(frozen=True)
class Rotation:
    """A rotation in float32 (float64 for float64 rows), rounded once to the dtype of the input."""

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
        """Rotate rows, multiplying by the signs before the transform or after it."""
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
        # Tensors made in a mode are invalid after it ends: do not cache them.
        make = _make_scaled_signs if type(x) is Tensor else _make_scaled_signs.__wrapped__
        return make(self.seed, x.shape[-1], _get_compute_dtype(x.dtype), x.device)


def split_into_blocks(dim: int) -> list[int]:
    """Return the powers of two that sum to `dim`, largest first."""
    return [1 << bit for bit in reversed(range(dim.bit_length())) if dim >> bit & 1]


def make_signs(seed: int, dim: int) -> list[int]:
    """Return `dim` values of +1 or -1: the top bits of a SplitMix64 stream from (seed, dim).

    Files depend on this stream; it must never change.
    """
    stream = splitmix64(next(splitmix64(seed)) + dim)
    return [1 if next(stream) >> 63 else -1 for _ in range(dim)]


def splitmix64(state: int) -> Iterator[int]:
    """Yield the stream of SplitMix64.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
    """
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
    """Compute H x, block by block."""
    sizes = split_into_blocks(x.shape[-1])
    parts = [_apply_butterfly(part) for part in torch.split(x, sizes, dim=-1)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _apply_butterfly(x: Tensor) -> Tensor:
    size = x.shape[-1]
    # The product with +-1 is exact, so one addcmul computes both sum and difference. The signs are
    # created on the device, since a CUDA graph must not capture a copy from the host.
    sign = torch.arange(1, -2, -2, dtype=x.dtype, device=x.device)[:, None]
    y = x.reshape(-1, size)
    for _ in range(size.bit_length() - 1):
        even, odd = y.view(-1, 1, size // 2, 2).unbind(-1)
        y = torch.addcmul(even, odd, sign)
    return y.view(x.shape)


ROWS_PER_PROGRAM = 4  # a program is one warp: its lanes exchange values without a barrier


def can_launch(x: Tensor) -> bool:
    """Tell whether `launch_rotation` supports x: rows on a GPU that runs the kernel."""
    return x.is_cuda and is_kernel_readable(x) and _can_run_kernel()


def launch_rotation(
    x: Tensor, get_signs: Callable[[Tensor], Tensor], dtype: torch.dtype, *, signs_last: bool
) -> Tensor:
    """Rotate rows [B, H, T, D], multiplying by the D signs before the transform or after it.

    Nothing is copied to the device and nothing synchronizes, so a CUDA graph can capture a launch.
    `get_signs` caches signs; it is called on real tensors only.
    """
    from kvant.codecs.frames.rotation_kernel import rotate

    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    assert type(out) is Tensor, "the mode makes outputs without storage"
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
            enable_fp_fusion=False,  # fused operations would round differently from torch
        )
    return out


@lru_cache(maxsize=1)
def _can_run_kernel() -> bool:
    """Tell whether Triton is installed and compiles kernels for a GPU."""
    if not is_triton_installed():
        return False
    from kvant.codecs.frames.rotation_kernel import rotate

    return get_compiled_flags(rotate) == {True}
