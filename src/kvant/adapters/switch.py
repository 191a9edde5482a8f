"""Run forwards of a model with an adapter, without changing the model.

The switch is a mode of torch's functions. It belongs to one thread and ends with its context, so
other users of the model see no adapter, and neither does a forward after an error. Layers are
recognized by their weight: dense, packed or rounded, it is the operand of one function.

    nn.Linear               functional.linear(rows, weight, bias)
    Conv1D of transformers  torch.addmm(bias, rows, weight)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from kvant.adapters.adapter import Adapter, LowRankProduct
from kvant.errors import AdapterError


class Operand(NamedTuple):
    """An argument of a function: its position, and its name."""

    position: int
    name: str

    def get(self, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        return args[self.position] if len(args) > self.position else options.get(self.name)


# The rows and the weight of the functions that compute a layer.
LAYER_OPERANDS = {
    functional.linear: (Operand(0, "input"), Operand(1, "weight")),
    torch.addmm: (Operand(1, "mat1"), Operand(2, "mat2")),
}


class AdapterSwitch:
    """Adds the products of one adapter at a time to the layers of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._used: set[Adapter] = set()  # whose products were added

    @contextmanager
    def use(self, adapter: Adapter | None) -> Iterator[None]:
        """Compute the forwards of this thread with an adapter until the context ends.

        Raise AdapterError if the first one adds none of its products. A replay adds them unseen.
        """
        if adapter is None:
            yield
            return
        # Now: `pack` and `unpack` replace the weights of a model.
        weights = {name: self._modules[name]._parameters["weight"] for name in adapter.products}
        mode = _ProductMode({id(weights[name]): x for name, x in adapter.products.items()})
        with mode:
            yield
        if mode.is_used:
            self._used.add(adapter)
        if adapter not in self._used:
            raise AdapterError(
                f"{type(self._modules['']).__name__} does not compute {next(iter(weights))} by "
                "functional.linear or torch.addmm: the adapter has no effect; serve its merged "
                "weights as a model"
            )


class _ProductMode(TorchFunctionMode):
    """Adds products to the outputs of the layers whose weights have these ids."""

    def __init__(self, products: Mapping[int, LowRankProduct]) -> None:
        super().__init__()
        self._products = products
        self.is_used = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        outputs = func(*args, **options)
        if func not in LAYER_OPERANDS:
            return outputs
        rows, weight = (operand.get(args, options) for operand in LAYER_OPERANDS[func])
        product = self._products.get(id(weight))
        if product is None:
            return outputs
        self.is_used = True
        return product.add_to(outputs, rows)
