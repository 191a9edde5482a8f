"""Multiply with weights in oneDNN's packed order, by oneDNN or by a faster kernel of our own.

A product of a few rows is limited by reading the weight; oneDNN reads at about two thirds of the
memory bandwidth. Our kernel reads the same bytes faster and adds in oneDNN's order, so outputs are
equal to the bit. oneDNN sums products over blocks of columns, then over blocks. The block size
depends on the shape, the rows and the threads: a trial before the first product finds it. If no
block size reproduces oneDNN's bits, oneDNN computes the product.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from kvant.native import PACKED_IN_BLOCK, PACKED_OUT_BLOCK, get_library, multiply_packed
from kvant.platform.torch_runtime import is_tracing

# Private operators of torch; without them nothing is packed.
_REORDER_OP = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_LINEAR_OP = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_DATA_PTR_OP = getattr(torch.ops.mkldnn, "data_ptr", None)
_NBYTES_OP = getattr(torch.ops.mkldnn, "_nbytes", None)

MAX_KERNEL_ROWS = 32  # with more rows, oneDNN is about as fast
NUM_TRIAL_OUTPUTS = 1024  # compared by a trial
K_BLOCK_CANDIDATES = (64, 128, 256, 512, 1024, 2048, 4096)  # columns per block
K_SPLIT_CANDIDATES = (1, 2, 3, 4)  # equal blocks per row

ProductKey = tuple[int, int]  # rows and threads


def has_packing_operators() -> bool:
    """Tell whether this torch has the operators."""
    return _REORDER_OP is not None and _LINEAR_OP is not None


def explain_refusal(dtype: torch.dtype) -> str | None:
    """Explain why no weight of this dtype can be packed here; None where one can."""
    if not has_packing_operators():
        return f"torch {torch.__version__} has no operators to pack weights with"
    try:
        PackedMatrix(torch.zeros(PACKED_OUT_BLOCK, PACKED_IN_BLOCK, dtype=dtype), SummationOrder())
    except RuntimeError as error:
        name, reason = str(dtype).removeprefix("torch."), str(error).splitlines()[0]
        return f"oneDNN packs no {name} weights on this processor ({reason})"
    return None


def is_readable_bias(weight: Tensor | PackedMatrix, bias: Tensor) -> bool:
    """Tell whether a bias is contiguous with one value per output; oneDNN does not check."""
    alike = (bias.dtype, bias.device) == (weight.dtype, weight.device)
    return alike and bias.shape == weight.shape[:1] and bias.is_contiguous()


class SummationOrder:
    """oneDNN's columns per block for weights of one shape, by rows and threads; 0: unknown."""

    def __init__(self) -> None:
        self._k_blocks: dict[ProductKey, int] = {}

    def find_k_block(self, num_rows: int, matrix: PackedMatrix) -> int:
        """Return the columns per block; run a trial on first use."""
        key = num_rows, torch.get_num_threads()
        if key not in self._k_blocks and key not in matrix.inconclusive:
            k_block = _run_trial(num_rows, matrix)
            if k_block is None:
                matrix.inconclusive.add(key)
            else:
                self._k_blocks[key] = k_block
        return self._k_blocks.get(key, 0)


class PackedMatrix:
    """The packed bytes of a weight [out, in], which are never written to."""

    def __init__(self, weight: Tensor, summation_order: SummationOrder) -> None:
        assert _REORDER_OP is not None
        self.summation_order = summation_order
        self.inconclusive: set[ProductKey] = set()  # trials that could not tell two orders apart
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self.tensor: Tensor = _REORDER_OP(weight.detach().contiguous(), None)
        self.pointer = self._find_pointer()

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def to_dense(self) -> Tensor:
        return self.tensor.to_dense()

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute `torch.nn.functional.linear`, to the bit of the dense weight's."""
        if k_block := self.find_kernel_k_block(x, bias):
            return self.multiply_by_kernel(x, bias, k_block=k_block)
        return self.multiply_by_onednn(x, bias)

    def multiply_by_kernel(
        self, x: Tensor, bias: Tensor | None, *, k_block: int, out_features: int | None = None
    ) -> Tensor:
        """Compute the first outputs, or all, with our kernel."""
        assert self.pointer is not None
        return multiply_packed(
            x, self.pointer, bias, out_features=out_features or self.shape[0], k_block=k_block
        )

    def multiply_by_onednn(self, x: Tensor, bias: Tensor | None) -> Tensor:
        assert _LINEAR_OP is not None
        # For strided rows of 3 dimensions torch rounds the product before it adds the bias.
        if bias is not None and x.ndim > 2 and not x.is_contiguous():
            return self.multiply_by_onednn(x, None).add_(bias)
        return cast(Tensor, _LINEAR_OP(x, self.tensor, bias, "none", [], ""))

    def _find_pointer(self) -> tuple[int, int] | None:
        """Return address and bytes if our kernel can read them, else None."""
        out_features, in_features = self.shape
        if get_library().functions is None or _DATA_PTR_OP is None or _NBYTES_OP is None:
            return None
        address, nbytes = _DATA_PTR_OP(self.tensor), _NBYTES_OP(self.tensor)
        needed = (
            -(-out_features // PACKED_OUT_BLOCK)
            * PACKED_OUT_BLOCK
            * in_features
            * self.dtype.itemsize
        )
        fits = (
            self.dtype is torch.bfloat16 and in_features % PACKED_IN_BLOCK == 0 and nbytes == needed
        )
        return (address, nbytes) if fits else None

    def find_kernel_k_block(self, x: Tensor, bias: Tensor | None) -> int:
        """Return the columns per block for our kernel; 0 if oneDNN must compute the product."""
        out_features, in_features = self.shape
        rows = x.numel() // in_features
        if (
            self.pointer is None
            or not 0 < rows <= MAX_KERNEL_ROWS
            or x.shape[-1] != in_features
            or x.dtype is not self.dtype
            or not x.is_contiguous()
            or is_tracing()
        ):
            return 0
        if bias is not None and (
            type(bias) not in (Tensor, nn.Parameter)
            or not bias.is_cpu
            or bias.dtype is not self.dtype
            or bias.shape != (out_features,)
            or not bias.is_contiguous()
        ):
            return 0
        return self.summation_order.find_k_block(rows, self)


def _run_trial(num_rows: int, matrix: PackedMatrix) -> int | None:
    """Return the columns per block that give oneDNN's bits; 0 if none does; None if unclear.

    Few outputs rounded to 16 bits differ between two orders. With the negative output as a bias,
    nearly all do: the result is then the rounding error. A weight of zeros gives equal sums in any
    order, and NaN compares unequal, so such weights are inconclusive.
    """
    out_features, in_features = matrix.shape
    generator = torch.Generator().manual_seed(0)

    def draw_matrix(count: int) -> Tensor:
        return torch.randn(count, in_features, generator=generator, device="cpu").to(matrix.dtype)

    num_compared = min(out_features, NUM_TRIAL_OUTPUTS)
    shares = {-(-in_features // n // PACKED_IN_BLOCK) * PACKED_IN_BLOCK for n in K_SPLIT_CANDIDATES}
    k_blocks = sorted(shares | {block for block in K_BLOCK_CANDIDATES if block < in_features})
    for _ in range(-(-NUM_TRIAL_OUTPUTS // num_compared)):
        x = draw_matrix(1).expand(num_rows, in_features).contiguous()
        bias = -matrix.multiply_by_onednn(x, None)[0]
        residual = matrix.multiply_by_onednn(x, bias)[:, :num_compared]
        bias = bias[:num_compared]
        if not residual.isfinite().all():
            return None
        k_blocks = [
            k_block
            for k_block in k_blocks
            if torch.equal(
                residual,
                matrix.multiply_by_kernel(x, bias, k_block=k_block, out_features=num_compared),
            )
        ]
    if len(k_blocks) != 1:
        return None if k_blocks else 0
    x = draw_matrix(num_rows)
    by_kernel = matrix.multiply_by_kernel(x, None, k_block=k_blocks[0])
    return k_blocks[0] if torch.equal(matrix.multiply_by_onednn(x, None), by_kernel) else 0
