"""A weight in the order in which oneDNN reads it, and products with it.

A product of a few rows takes what reading the weight takes, and oneDNN reads it at about two thirds
of what memory gives. A kernel of our own reads the same bytes faster, and adds as oneDNN does, so
outputs are the same to the bit. How many columns oneDNN sums before it adds them to the others
depends on the shape, the rows and the threads: a trial finds it when a product is first asked for,
and where nothing fits, oneDNN computes.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from kvant.native import PACKED_IN_BLOCK, PACKED_OUT_BLOCK, get_library, multiply_packed
from kvant.torch_modes import is_tracing

# Private to torch: where one is missing, nothing is packed.
_REORDER_OP = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_LINEAR_OP = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_DATA_PTR_OP = getattr(torch.ops.mkldnn, "data_ptr", None)
_NBYTES_OP = getattr(torch.ops.mkldnn, "_nbytes", None)

MAX_KERNEL_ROWS = 32  # rows: of more, both take about as long
NUM_TRIAL_OUTPUTS = 1024  # outputs that a trial compares
K_BLOCK_CANDIDATES = (64, 128, 256, 512, 1024, 2048, 4096)  # columns that may be a part, beside
K_SPLIT_CANDIDATES = (1, 2, 3, 4)  # these shares of all

ProductKey = tuple[int, int]  # rows and threads


def has_packing_operators() -> bool:
    """Has this torch the operators?"""
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
    """Is it a number for each output? oneDNN reads as many behind its address, whatever it is."""
    alike = (bias.dtype, bias.device) == (weight.dtype, weight.device)
    return alike and bias.shape == weight.shape[:1] and bias.is_contiguous()


class SummationOrder:
    """How oneDNN adds the products with weights of one shape: the columns of a part, or 0."""

    def __init__(self) -> None:
        self._k_blocks: dict[ProductKey, int] = {}

    def find_k_block(self, num_rows: int, matrix: PackedMatrix) -> int:
        asked = num_rows, torch.get_num_threads()
        if asked not in self._k_blocks and asked not in matrix.inconclusive:
            found = _run_trial(num_rows, matrix)
            if found is None:
                matrix.inconclusive.add(asked)
            else:
                self._k_blocks[asked] = found
        return self._k_blocks.get(asked, 0)


class PackedMatrix:
    """Packed bytes of a weight [out, in], which nobody writes to."""

    def __init__(self, weight: Tensor, summation_order: SummationOrder) -> None:
        assert _REORDER_OP is not None
        self.summation_order = summation_order
        self.inconclusive: set[ProductKey] = set()  # tried with it, which told nothing of the order
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self.tensor: Tensor = _REORDER_OP(weight.detach().contiguous(), None)
        self.pointer = self._find_pointer()

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def to_dense(self) -> Tensor:
        return self.tensor.to_dense()

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """What `torch.nn.functional.linear` gives with the dense weight."""
        if part := self.find_kernel_k_block(x, bias):
            return self.multiply_by_kernel(x, bias, k_block=part)
        return self.multiply_by_onednn(x, bias)

    def multiply_by_kernel(
        self, x: Tensor, bias: Tensor | None, *, k_block: int, out_features: int | None = None
    ) -> Tensor:
        """The first outputs, or all; the sums of `part` columns are added to those before."""
        assert self.pointer is not None
        return multiply_packed(
            x, self.pointer, bias, out_features=out_features or self.shape[0], k_block=k_block
        )

    def multiply_by_onednn(self, x: Tensor, bias: Tensor | None) -> Tensor:
        assert _LINEAR_OP is not None
        # Of such rows torch rounds the product before it adds the bias; of others it does not.
        if bias is not None and x.ndim > 2 and not x.is_contiguous():
            return self.multiply_by_onednn(x, None).add_(bias)
        return cast(Tensor, _LINEAR_OP(x, self.tensor, bias, "none", [], ""))

    def _find_pointer(self) -> tuple[int, int] | None:
        """Address and bytes, where they lie as the kernel reads them."""
        outs, width = self.shape
        if get_library().functions is None or _DATA_PTR_OP is None or _NBYTES_OP is None:
            return None
        address, nbytes = _DATA_PTR_OP(self.tensor), _NBYTES_OP(self.tensor)
        whole = -(-outs // PACKED_OUT_BLOCK) * PACKED_OUT_BLOCK * width * self.dtype.itemsize
        fits = self.dtype is torch.bfloat16 and width % PACKED_IN_BLOCK == 0 and nbytes == whole
        return (address, nbytes) if fits else None

    def find_kernel_k_block(self, x: Tensor, bias: Tensor | None) -> int:
        """The columns of a part where our kernel computes this product, else 0."""
        outs, width = self.shape
        rows = x.numel() // width
        if (
            self.pointer is None
            or not 0 < rows <= MAX_KERNEL_ROWS
            or x.shape[-1] != width
            or x.dtype is not self.dtype
            or not x.is_contiguous()
            or is_tracing()
        ):
            return 0
        if bias is not None and (
            type(bias) not in (Tensor, nn.Parameter)
            or not bias.is_cpu
            or bias.dtype is not self.dtype
            or bias.shape != (outs,)
            or not bias.is_contiguous()
        ):
            return 0
        return self.summation_order.find_k_block(rows, self)


def _run_trial(num_rows: int, matrix: PackedMatrix) -> int | None:
    """The part whose sums give oneDNN's bits, or 0; None of a weight that does not tell.

    Rounded to 16 bits, few outputs tell one order from another. With the outputs themselves taken
    away as a bias, nearly all do: what is left is what rounding took. A weight of zeros tells no
    two orders apart, and one with NaN is equal to nothing: neither says anything of its shape.
    """
    outs, width = matrix.shape
    generator = torch.Generator().manual_seed(0)

    def draw_matrix(count: int) -> Tensor:
        return torch.randn(count, width, generator=generator, device="cpu").to(matrix.dtype)

    first = min(outs, NUM_TRIAL_OUTPUTS)
    shares = {-(-width // n // PACKED_IN_BLOCK) * PACKED_IN_BLOCK for n in K_SPLIT_CANDIDATES}
    parts = sorted(shares | {block for block in K_BLOCK_CANDIDATES if block < width})
    for _ in range(-(-NUM_TRIAL_OUTPUTS // first)):
        x = draw_matrix(1).expand(num_rows, width).contiguous()
        bias = -matrix.multiply_by_onednn(x, None)[0]
        rest = matrix.multiply_by_onednn(x, bias)[:, :first]
        bias = bias[:first]
        if not rest.isfinite().all():
            return None
        parts = [
            part
            for part in parts
            if torch.equal(
                rest, matrix.multiply_by_kernel(x, bias, k_block=part, out_features=first)
            )
        ]
    if len(parts) != 1:
        return None if parts else 0
    x = draw_matrix(num_rows)
    plain, own = (
        matrix.multiply_by_onednn(x, None),
        matrix.multiply_by_kernel(x, None, k_block=parts[0]),
    )
    return parts[0] if torch.equal(plain, own) else 0
