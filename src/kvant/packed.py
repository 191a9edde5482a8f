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

from kvant.modes import passing
from kvant.native import PACKED_OUTS, PACKED_WIDTH, library, multiplied

# Private to torch: where one is missing, nothing is packed.
_PACK = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_ADDRESS = getattr(torch.ops.mkldnn, "data_ptr", None)
_NBYTES = getattr(torch.ops.mkldnn, "_nbytes", None)

FEW = 32  # rows: of more, both take about as long
TRIED = 1024  # outputs that a trial compares
BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)  # columns that may be a part, beside
SPLITS = (1, 2, 3, 4)  # these shares of all

Asked = tuple[int, int]  # rows and threads


def known() -> bool:
    """Has this torch the operators?"""
    return _PACK is not None and _LINEAR is not None


def explain_refusal(dtype: torch.dtype) -> str | None:
    """Explain why no weight of this dtype can be packed here; None where one can."""
    if not known():
        return f"torch {torch.__version__} has no operators to pack weights with"
    try:
        PackedMatrix(torch.zeros(PACKED_OUTS, PACKED_WIDTH, dtype=dtype), Order())
    except RuntimeError as error:
        name, reason = str(dtype).removeprefix("torch."), str(error).splitlines()[0]
        return f"oneDNN packs no {name} weights on this processor ({reason})"
    return None


def reads(weight: Tensor | PackedMatrix, bias: Tensor) -> bool:
    """Is it a number for each output? oneDNN reads as many behind its address, whatever it is."""
    alike = (bias.dtype, bias.device) == (weight.dtype, weight.device)
    return alike and bias.shape == weight.shape[:1] and bias.is_contiguous()


class Order:
    """How oneDNN adds the products with weights of one shape: the columns of a part, or 0."""

    def __init__(self) -> None:
        self._parts: dict[Asked, int] = {}

    def part(self, rows: int, matrix: PackedMatrix) -> int:
        asked = rows, torch.get_num_threads()
        if asked not in self._parts and asked not in matrix.mute:
            found = _tried(rows, matrix)
            if found is None:
                matrix.mute.add(asked)
            else:
                self._parts[asked] = found
        return self._parts.get(asked, 0)


class PackedMatrix:
    """Packed bytes of a weight [out, in], which nobody writes to."""

    def __init__(self, weight: Tensor, order: Order) -> None:
        assert _PACK is not None
        self.order = order
        self.mute: set[Asked] = set()  # tried with it, which told nothing of the order
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self.tensor: Tensor = _PACK(weight.detach().contiguous(), None)
        self.place = self._place()

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def dense(self) -> Tensor:
        return self.tensor.to_dense()

    def times(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """What `torch.nn.functional.linear` gives with the dense weight."""
        if part := self.kernel_part(x, bias):
            return self.by_kernel(x, bias, part=part)
        return self.by_onednn(x, bias)

    def by_kernel(
        self, x: Tensor, bias: Tensor | None, *, part: int, outs: int | None = None
    ) -> Tensor:
        """The first outputs, or all; the sums of `part` columns are added to those before."""
        assert self.place is not None
        return multiplied(x, self.place, bias, outs=outs or self.shape[0], part=part)

    def by_onednn(self, x: Tensor, bias: Tensor | None) -> Tensor:
        assert _LINEAR is not None
        # Of such rows torch rounds the product before it adds the bias; of others it does not.
        if bias is not None and x.ndim > 2 and not x.is_contiguous():
            return self.by_onednn(x, None).add_(bias)
        return cast(Tensor, _LINEAR(x, self.tensor, bias, "none", [], ""))

    def _place(self) -> tuple[int, int] | None:
        """Address and bytes, where they lie as the kernel reads them."""
        outs, width = self.shape
        if library().functions is None or _ADDRESS is None or _NBYTES is None:
            return None
        address, nbytes = _ADDRESS(self.tensor), _NBYTES(self.tensor)
        whole = -(-outs // PACKED_OUTS) * PACKED_OUTS * width * self.dtype.itemsize
        fits = self.dtype is torch.bfloat16 and width % PACKED_WIDTH == 0 and nbytes == whole
        return (address, nbytes) if fits else None

    def kernel_part(self, x: Tensor, bias: Tensor | None) -> int:
        """The columns of a part where our kernel computes this product, else 0."""
        outs, width = self.shape
        rows = x.numel() // width
        if (
            self.place is None
            or not 0 < rows <= FEW
            or x.shape[-1] != width
            or x.dtype is not self.dtype
            or not x.is_contiguous()
            or passing()
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
        return self.order.part(rows, self)


def _tried(rows: int, matrix: PackedMatrix) -> int | None:
    """The part whose sums give oneDNN's bits, or 0; None of a weight that does not tell.

    Rounded to 16 bits, few outputs tell one order from another. With the outputs themselves taken
    away as a bias, nearly all do: what is left is what rounding took. A weight of zeros tells no
    two orders apart, and one with NaN is equal to nothing: neither says anything of its shape.
    """
    outs, width = matrix.shape
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> Tensor:
        return torch.randn(count, width, generator=generator, device="cpu").to(matrix.dtype)

    first = min(outs, TRIED)
    shares = {-(-width // n // PACKED_WIDTH) * PACKED_WIDTH for n in SPLITS}
    parts = sorted(shares | {block for block in BLOCKS if block < width})
    for _ in range(-(-TRIED // first)):
        x = drawn(1).expand(rows, width).contiguous()
        bias = -matrix.by_onednn(x, None)[0]
        rest = matrix.by_onednn(x, bias)[:, :first]
        bias = bias[:first]
        if not rest.isfinite().all():
            return None
        parts = [
            part
            for part in parts
            if torch.equal(rest, matrix.by_kernel(x, bias, part=part, outs=first))
        ]
    if len(parts) != 1:
        return None if parts else 0
    x = drawn(rows)
    plain, own = matrix.by_onednn(x, None), matrix.by_kernel(x, None, part=parts[0])
    return parts[0] if torch.equal(plain, own) else 0
