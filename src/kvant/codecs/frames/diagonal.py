"""The identity frame, channel scales (`smooth`), and products of frames.

A scale evens out channels that are large in every row. It is fitted to a model and stored in the
spec. It is never fitted to a sequence, since sequences could then not share sealed pages. Until the
model is known, a `SmoothPlaceholder` stands for the scale; it transforms no rows and is never
saved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from kvant.contracts import Frame
from kvant.errors import SpecError
from kvant.platform.torch_runtime import is_tracing, no_inference_mode

# The scale and its reciprocal are normal numbers in float32.
MIN_SCALE, MAX_SCALE = 1e-30, 1e30


@dataclass(frozen=True)
class Identity:
    """A = 1: rows are stored unchanged."""

    name: ClassVar[str] = "identity"
    is_identity: ClassVar[bool] = True

    def transform_rows(self, x: Tensor) -> Tensor:
        return x

    def transform_queries(self, q: Tensor) -> Tensor:
        return q

    def restore_outputs(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Diagonal:
    """A = diag(scale): one tuple of channels per key head, or a single one for all heads."""

    scale: tuple[tuple[float, ...], ...]
    name: ClassVar[str] = "diagonal"
    is_identity: ClassVar[bool] = False

    def __post_init__(self) -> None:
        widths = {len(head) for head in self.scale}
        if len(widths) != 1 or 0 in widths:
            raise ValueError(
                f"scale has heads of {sorted(widths)} channels; every head needs the same number"
            )
        for value in (value for head in self.scale for value in head):
            if not (math.isfinite(value) and MIN_SCALE <= abs(value) <= MAX_SCALE):
                raise ValueError(
                    f"scale has the value {value}; magnitudes must lie in [{MIN_SCALE}, "
                    f"{MAX_SCALE}]"
                )

    def transform_rows(self, x: Tensor) -> Tensor:
        return (x * self._get_factors(x)).to(x.dtype)

    def transform_queries(self, q: Tensor) -> Tensor:
        return q / self._get_factors(q)

    def restore_outputs(self, x: Tensor) -> Tensor:
        return self.transform_queries(x).to(x.dtype)

    @cached_property
    def _scale_tensor(self) -> Tensor:
        with no_inference_mode():
            return torch.tensor(self.scale, dtype=torch.float64).unsqueeze(1)

    @cached_property
    def _factor_cache(self) -> dict[tuple[int, torch.dtype, torch.device], Tensor]:
        """Factors by heads, dtype and device, so that decoding copies nothing to a GPU."""
        return {}

    def _get_factors(self, x: Tensor) -> Tensor:
        """Return factors [H * group, 1, D] for x [..., H * group, T, D]."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        key = x.shape[-3] if x.ndim > 2 else 1, dtype, x.device
        cached = self._factor_cache.get(key)
        if cached is not None and x.shape[-1] == cached.shape[-1]:
            return cached
        factors = self._repeat_factors(x, dtype)
        # Tensors of a mode or a compiler are invalid after it ends: do not cache them.
        if type(factors) is Tensor and not is_tracing():
            self._factor_cache[key] = factors
        return factors

    def _repeat_factors(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        heads, dim = len(self.scale), len(self.scale[0])
        if x.shape[-1] != dim:
            raise ValueError(f"rows have {x.shape[-1]} channels; this scale has {dim}")
        with no_inference_mode():
            factors = self._scale_tensor.to(x.device, dtype)
            if heads == 1:
                return factors
            if x.shape[-3] % heads:
                raise ValueError(
                    f"{x.shape[-3]} heads are no multiple of the {heads} heads of this scale"
                )
            return factors.repeat_interleave(x.shape[-3] // heads, dim=0)


@dataclass(frozen=True)
class SmoothPlaceholder:
    """Stands for a `Diagonal` whose scale is not fitted yet."""

    is_identity: ClassVar[bool] = False

    def transform_rows(self, x: Tensor) -> Tensor:
        self.refuse()

    def transform_queries(self, q: Tensor) -> Tensor:
        self.refuse()

    def restore_outputs(self, x: Tensor) -> Tensor:
        self.refuse()

    def refuse(self) -> NoReturn:
        raise SpecError(
            "smooth needs channel scales fitted to a model: get the cache, or its spec, from "
            "kvant.cache_for(model, ...)"
        )


@dataclass(frozen=True)
class FrameProduct:
    """A = A_n ... A_1: the first frame is applied to rows first, and undone last."""

    frames: tuple[Frame, ...]
    name: ClassVar[str] = "product"

    @property
    def is_identity(self) -> bool:
        return all(frame.is_identity for frame in self.frames)

    def transform_rows(self, x: Tensor) -> Tensor:
        for frame in self.frames:
            x = frame.transform_rows(x)
        return x

    def transform_queries(self, q: Tensor) -> Tensor:
        for frame in self.frames:
            q = frame.transform_queries(q)
        return q

    def restore_outputs(self, x: Tensor) -> Tensor:
        for frame in reversed(self.frames):
            x = frame.restore_outputs(x)
        return x


def add_smoothing(frame: Frame) -> Frame:
    """Return `frame` after a scale that is to be fitted."""
    return SmoothPlaceholder() if frame.is_identity else FrameProduct((SmoothPlaceholder(), frame))


def needs_fitting(frame: Frame) -> bool:
    """Tell whether the frame has a scale that is not fitted yet."""
    if isinstance(frame, FrameProduct):
        return any(needs_fitting(part) for part in frame.frames)
    return isinstance(frame, SmoothPlaceholder)


def fill_smoothing(frame: Frame, scale: Frame) -> Frame:
    """Return `frame` with its placeholders replaced by `scale`."""
    if isinstance(frame, FrameProduct):
        return FrameProduct(tuple(fill_smoothing(part, scale) for part in frame.frames))
    return scale if isinstance(frame, SmoothPlaceholder) else frame
