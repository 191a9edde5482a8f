"""What an adapter adds to the outputs of a model's layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.nn.functional import linear


@dataclass(frozen=True, eq=False)
class LowRankProduct:
    """What is added to the outputs of one layer: rows @ down.T @ up.T.

    On a CPU it is computed and added in float32: many processors multiply 16-bit matrices 10 to 80
    times more slowly. The sum is rounded once, to the dtype of the outputs.
    """

    down: Tensor  # [rank, inputs]
    up: Tensor  # [outputs, rank], times the scale

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + self.up.nbytes

    def add_to(self, outputs: Tensor, rows: Tensor) -> Tensor:
        """Return the outputs of the layer for `rows`, plus the product."""
        low = linear(rows.to(self.down.dtype), self.down)
        return (outputs + linear(low, self.up)).to(outputs.dtype)


@dataclass(frozen=True, eq=False)
class Adapter:
    """The products of a LoRA adapter, on the devices of one model's layers."""

    key: str  # hash of the content: adapters of other names with the same content share prefixes
    products: Mapping[str, LowRankProduct] = field(repr=False)  # by name of the layer

    @property
    def nbytes(self) -> int:
        return sum(product.nbytes for product in self.products.values())
