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

from kvant.launches import compiled, installed, on
from kvant.modes import no_inference_mode
from kvant.native import Signs, present, rotatable, rotated

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the step of SplitMix64


@dataclass(frozen=True)
class Rotation:
    """Computes in float32 (float64 for float64) and rounds once, to the dtype that came."""

    seed: int = 0
    name: ClassVar[str] = "rotation"
    trivial: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed is {self.seed!r}; it must be an integer")
        if not 0 <= self.seed <= MASK:
            raise ValueError(f"seed is {self.seed}; it must lie in [0, 2**64)")

    def rows(self, x: Tensor) -> Tensor:
        return self._turned(x, x.dtype, last=False)

    def queries(self, q: Tensor) -> Tensor:
        return self._turned(q, _wide(q.dtype), last=False)

    def outputs(self, x: Tensor) -> Tensor:
        return self._turned(x, x.dtype, last=True)

    def _turned(self, x: Tensor, dtype: torch.dtype, *, last: bool) -> Tensor:
        """The signs come before the transform, or last; either way each product is rounded."""
        if launchable(x):
            return launched(x, self._signs, dtype, last=last)
        if x.dtype != dtype:
            x = x.to(dtype)
        if rotatable(x):
            return rotated(x, _native_signs(self.seed, x.shape[-1]), last=last)
        wide = x.to(_wide(dtype))
        signs = self._signs(wide)
        wide = _transformed(wide) * signs if last else _transformed(wide * signs)
        return wide.to(dtype)

    def _signs(self, x: Tensor) -> Tensor:
        # What a mode makes of other tensors ends with it, and must not be kept.
        made = _scaled_signs if type(x) is Tensor else _scaled_signs.__wrapped__
        return made(self.seed, x.shape[-1], _wide(x.dtype), x.device)


def blocks(dim: int) -> list[int]:
    """The powers of two that `dim` is made of, largest first."""
    return [1 << bit for bit in reversed(range(dim.bit_length())) if dim >> bit & 1]


def signs(seed: int, dim: int) -> list[int]:
    """`dim` values of +1 or -1: the top bits of a SplitMix64 stream started at (seed, dim).

    Files depend on this stream; it must never change.
    """
    stream = splitmix64(next(splitmix64(seed)) + dim)
    return [1 if next(stream) >> 63 else -1 for _ in range(dim)]


def splitmix64(state: int) -> Iterator[int]:
    """Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014)."""
    while True:
        state = (state + GOLDEN) & MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        yield z ^ (z >> 31)


@lru_cache(maxsize=256)
def _scaled_signs(seed: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with no_inference_mode():
        return torch.tensor(_scaled(seed, dim), dtype=dtype, device=device)


@lru_cache(maxsize=256)
def _native_signs(seed: int, dim: int) -> Signs:
    return (ctypes.c_float * dim)(*_scaled(seed, dim))


def _scaled(seed: int, dim: int) -> list[float]:
    sizes = [size for size in blocks(dim) for _ in range(size)]
    return [s * size**-0.5 for s, size in zip(signs(seed, dim), sizes, strict=True)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _transformed(x: Tensor) -> Tensor:
    """H x, block by block."""
    sizes = blocks(x.shape[-1])
    parts = [_butterfly(part) for part in torch.split(x, sizes, dim=-1)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _butterfly(x: Tensor) -> Tensor:
    size = x.shape[-1]
    # The product with +-1 is exact, so one fused operation serves for sum and difference.
    # Made where it is needed: a captured step must hold no copy to the device.
    sign = torch.arange(1, -2, -2, dtype=x.dtype, device=x.device)[:, None]
    y = x.reshape(-1, size)
    for _ in range(size.bit_length() - 1):
        even, odd = y.view(-1, 1, size // 2, 2).unbind(-1)
        y = torch.addcmul(even, odd, sign)
    return y.view(x.shape)


ROWS = 4  # a program, which is one warp: what lanes exchange waits for no others


def launchable(x: Tensor) -> bool:
    """Whether `launched` serves this: rows on a GPU where the kernel runs."""
    return x.is_cuda and present(x) and _runs()


def launched(
    x: Tensor, signs: Callable[[Tensor], Tensor], dtype: torch.dtype, *, last: bool
) -> Tensor:
    """Rows [B, H, T, D] turned, multiplied by the D signs for them before that, or last.

    Nothing is copied to the device and nothing waits for it, so a launch can be captured. Signs are
    kept by whoever gives them, so they are asked for where memory is memory.
    """
    from kvant.codecs.frames.kernels import rotate

    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    assert type(out) is Tensor, "rows that are there, in a mode whose tensors are not"
    batch, heads, count, dim = x.shape
    rows = batch * heads * count
    if rows == 0:
        return out
    with on(x.device):
        rotate[-(-rows // ROWS),](
            *(x, signs(x), out, *x.stride()[:3], rows, heads, count),
            DIM=dim,
            LAST=last,
            ROWS=ROWS,
            num_warps=1,
            enable_fp_fusion=False,  # which rounds otherwise than torch does
        )
    return out


@lru_cache(maxsize=1)
def _runs() -> bool:
    """Can the kernel run on a GPU?"""
    if not installed():
        return False
    from kvant.codecs.frames.kernels import rotate

    return compiled(rotate) == {True}
