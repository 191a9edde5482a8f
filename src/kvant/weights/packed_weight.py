"""A parameter whose values are in a matrix for the kernels.

A linear layer multiplies with the matrix, an embedding reads rows of it; every other operation gets
the dense weight. In 16 bits that is the original parameter, which can be written. Codes are decoded
into a copy, and writes raise an error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_any, tree_map_only

from kvant.errors import CacheError
from kvant.platform.torch_runtime import is_dual_level_open, is_transforming
from kvant.weights.packed_matrix import (
    DENSE_DTYPES,
    CodedMatrix,
    DenseMatrix,
    WeightMatrix,
    can_multiply,
    multiply,
)


class PackedWeight(torch.Tensor):
    """The weight of a linear layer or an embedding whose values are in a matrix for the kernels."""

    _is_param = True  # so that isinstance(weight, nn.Parameter) holds

    original: nn.Parameter  # emptied if its values are codes
    _matrix: WeightMatrix

    @classmethod
    def from_matrix(cls, matrix: WeightMatrix, original: nn.Parameter) -> PackedWeight:
        weight: PackedWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            matrix.shape,
            dtype=original.dtype,
            device=original.device,
            requires_grad=original.requires_grad,
        )
        weight.__dict__.update(original.__dict__)
        weight.original, weight._matrix = original, matrix
        return weight

    @property
    def is_rounded(self) -> bool:
        return isinstance(self._matrix, CodedMatrix)

    @property
    def matrix(self) -> WeightMatrix:
        """The matrix; a dense one follows the original to another memory."""
        matrix = self._matrix
        if isinstance(matrix, DenseMatrix) and not _is_same_memory(self.original, matrix.tensor):
            matrix = self._matrix = DenseMatrix(self.original.detach())
        return matrix

    @property
    def operand(self) -> Tensor:
        """The operand of other operations: the original, or the weight, which is decoded."""
        return self if self.is_rounded else self.original

    def restore(self) -> nn.Parameter:
        """Return the original parameter, with its values restored."""
        if self.is_rounded and self.original.numel() == 0:
            self.original.data = self.matrix.to_dense()
            self.original.requires_grad_(self.requires_grad)
            self.original.grad = self.grad
        return self.original

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in FUNCTION_OVERRIDES:
            out = FUNCTION_OVERRIDES[func](*args, **(kwargs or {}))
            if out is not None:
                return out
        operands, options = tuple(args), dict(kwargs or {})
        if len(operands) == 1 and not options and type(operands[0]) is PackedWeight:
            operands = (_get_operand(operands[0]),)  # reading an attribute: the common case
        else:
            operands, options = tree_map_only(PackedWeight, _get_operand, (operands, options))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*operands, **options)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if _writes_packed_weight(func, args, options):
            raise _make_refusal(str(func))
        dense = tree_map_only(PackedWeight, _decode, (tuple(args), options))
        return func(*dense[0], **dense[1])

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        """Return a packed copy. Codes are shared, since they are never written to."""
        original = copy.deepcopy(self.original, memo)
        matrix = self.matrix if self.is_rounded else DenseMatrix(original.detach())
        memo[id(self)] = other = PackedWeight.from_matrix(matrix, original)
        if self.is_rounded:
            other.requires_grad_(self.requires_grad)
            other.grad = copy.deepcopy(self.grad, memo)
        return other

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickle the dense weight."""
        if not self.is_rounded:
            return _return_same, (self.original,)
        dense: Any = nn.Parameter(self.matrix.to_dense(), self.requires_grad)
        return dense.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, {self._matrix.format})"


def _return_same(original: Any) -> Any:
    return original


def _is_same_memory(first: Tensor, second: Tensor) -> bool:
    layouts = ((x.dtype, x.shape, x.stride(), x.data_ptr()) for x in (first, second))
    return next(layouts) == next(layouts)


def _get_operand(weight: PackedWeight) -> Tensor:
    _refuse_compilers()
    return weight.operand


def _decode(weight: PackedWeight) -> Tensor:
    _refuse_compilers()
    return weight.matrix.to_dense()


def _refuse_compilers() -> None:
    """Raise CacheError inside a compiler, which then runs the call uncompiled."""
    if torch.compiler.is_compiling():
        raise CacheError("packed weights cannot be compiled: call kvant.unpack(model) first")


def _compute_linear(rows: Any, weight: Any, bias: Any = None) -> Tensor | None:
    """Compute `functional.linear` by a kernel, of rows of any dtype; None: it needs torch."""
    if type(weight) is not PackedWeight or type(rows) is not Tensor or not _is_plain_forward(rows):
        return None
    if torch.is_grad_enabled() and any(
        operand is not None and operand.requires_grad for operand in (rows, weight, bias)
    ):
        return None
    matrix = weight.matrix
    if not _is_kernel_weight(weight) or not can_multiply(rows, matrix, bias):
        return None
    _refuse_compilers()
    return multiply(rows, matrix, bias)


def _is_kernel_weight(weight: PackedWeight) -> bool:
    """Tell whether the kernels read the weight; a dense one may have been converted since."""
    original = weight.original
    return weight.is_rounded or (
        original.dtype in DENSE_DTYPES and original.is_cpu and original.is_contiguous()
    )


def _is_plain_forward(x: Tensor) -> bool:
    """Tell whether no transform of torch, nor a conversion by autocast, is to see a product."""
    if is_transforming() or is_dual_level_open():
        return False
    return not torch.is_autocast_enabled("cpu") or torch.get_autocast_dtype("cpu") == x.dtype


def _look_up_rows(
    ids: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, *_: Any, **__: Any
) -> Tensor | None:
    """Compute `functional.embedding` from codes; None: it needs torch."""
    if type(weight) is not PackedWeight or not weight.is_rounded or max_norm is not None:
        return None
    if type(ids) is not Tensor or is_transforming() or is_dual_level_open():
        return None
    if weight.requires_grad and torch.is_grad_enabled():
        return None
    _refuse_compilers()
    return weight.matrix.take_rows(ids)


def _get_data(weight: PackedWeight) -> Any:
    """Return a weight's `data`; a dense copy would lose what is written to it."""
    if not weight.is_rounded:
        return weight.original.data
    original = nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)
    return PackedWeight.from_matrix(weight.matrix, original)


def _set_data(weight: Any, value: Any) -> bool | None:
    if type(weight) is not PackedWeight:
        return None
    if value is weight:
        return True
    if weight.is_rounded:
        raise _make_refusal("assigning to the data")
    weight.original.data = value
    weight._matrix = DenseMatrix(weight.original.detach())  # frees the memory before
    return True


def _check_conversion(weight: Any, other: Any) -> bool | None:
    """Tell `nn.Module.to` whether a converted weight can stay in the same parameter."""
    if type(weight) is not PackedWeight or not weight.is_rounded:
        return None
    if weight is not other:
        raise _make_refusal("a conversion")
    return True


def _make_refuser(operation: str) -> Callable[..., Any]:
    def refuse(target: Any, *args: Any) -> Any:
        if type(target) is PackedWeight and target.is_rounded:
            raise _make_refusal(operation)
        return None

    return refuse


def _make_refusal(operation: str) -> CacheError:
    return CacheError(
        f"{operation} of a rounded weight, whose values are codes: call kvant.unpack(model) first, "
        "then change the weight, or load the model again"
    )


# Functions that handle a packed weight themselves; None: use the dense weight.
FUNCTION_OVERRIDES: Mapping[Any, Callable[..., Any]] = {
    functional.linear: _compute_linear,
    functional.embedding: _look_up_rows,
    torch.Tensor.data.__get__: _get_data,  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.Tensor.__setitem__: _make_refuser("writing to rows"),
    torch.Tensor.data_ptr: _make_refuser("the address"),
    torch._has_compatible_shallow_copy_type: _check_conversion,
}


def _writes_packed_weight(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether an operator writes to a packed weight."""
    if not func._schema.is_mutable:
        return False
    targets = [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return bool(tree_any(lambda target: isinstance(target, PackedWeight), targets))


def get_weight_memory(tensor: Tensor) -> WeightMatrix | Tensor:
    """Return an object that keeps alive the memory which a weight's products read."""
    return tensor.matrix if isinstance(tensor, PackedWeight) else tensor.detach()


def get_weight_address(tensor: Tensor) -> object:
    """Return a value that changes when the memory of `get_weight_memory` changes."""
    return id(tensor.matrix) if isinstance(tensor, PackedWeight) else tensor.data_ptr()
