"""A parameter whose values are in a matrix for the kernels.

A linear layer multiplies with the matrix, an embedding reads rows of it; every other operation gets
the dense weight. In 16 bits that is the original parameter, which can be written. Codes are decoded
into a copy, and writes to the weight itself raise an error.

    parameter                        matrix               multiplied by
    [out, in]                        [out, in]            functional.linear
    [in, out] of GPT-2's Conv1D      [out, in]            torch.addmm
    [experts, out, in]               [experts * out, in]  functional.linear, expert by expert
    its transpose                    [experts * out, in]  functional.grouped_mm
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
from kvant.platform.devices import count_stored_nbytes
from kvant.platform.torch_runtime import is_dual_level_open, is_transforming, run_uncompiled
from kvant.weights.packed_matrix import (
    DENSE_DTYPES,
    SLICE_VALUES,
    CodedMatrix,
    DenseMatrix,
    WeightMatrix,
    can_multiply,
    multiply,
    multiply_groups,
    take_group,
)

LAST_TWO_DIMS = tuple(pair for a in (1, -2) for b in (2, -1) for pair in ((a, b), (b, a)))


class PackedWeight(torch.Tensor):
    """A weight of layers, an embedding or experts whose values are in a matrix for the kernels."""

    _is_param = True  # so that isinstance(weight, nn.Parameter) holds

    original: nn.Parameter  # emptied if its values are codes
    is_transposed: bool
    _shape: torch.Size
    _matrix: WeightMatrix

    @classmethod
    def from_matrix(
        cls,
        matrix: WeightMatrix,
        original: nn.Parameter,
        shape: torch.Size | None = None,  # default: the matrix's
        *,
        is_transposed: bool = False,
    ) -> PackedWeight:
        shape = matrix.shape if shape is None else shape
        weight: PackedWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            shape,
            dtype=original.dtype,
            device=original.device,
            requires_grad=original.requires_grad,
        )
        weight.__dict__.update(original.__dict__)
        weight.original, weight._matrix = original, matrix
        weight._shape, weight.is_transposed = shape, is_transposed
        return weight

    def _with_matrix(self, matrix: WeightMatrix, original: nn.Parameter) -> PackedWeight:
        return PackedWeight.from_matrix(
            matrix, original, self.dense_shape, is_transposed=self.is_transposed
        )

    @property
    def is_rounded(self) -> bool:
        return isinstance(self._matrix, CodedMatrix)

    @property
    def dense_shape(self) -> torch.Size:
        """The parameter's shape; a dense one may be assigned another."""
        return self._shape if self.is_rounded else self.original.shape

    @property
    def matrix(self) -> WeightMatrix:
        """The matrix; a dense one follows the original to another memory."""
        matrix = self._matrix
        if not isinstance(matrix, DenseMatrix) or self.is_transposed:
            return matrix
        if not _is_at_memory(matrix, self.original):
            matrix = self._matrix = make_dense_matrix(self.original)
        return matrix

    @run_uncompiled  # traced below a deep stack, it exceeds the limit of recursion
    def decode(self) -> Tensor:
        """Return the values in the parameter's shape."""
        *experts, rows, columns = self.dense_shape
        if not self.is_transposed:
            return self.matrix.to_dense().view(self.dense_shape)
        dense = self.matrix.to_dense().view(*experts, columns, rows)
        return dense.transpose(-2, -1).contiguous()

    @property
    def operand(self) -> Tensor:
        """The operand of other operations: the original, or the weight, which is decoded."""
        return self if self.is_rounded else self.original

    def restore(self) -> nn.Parameter:
        """Return the original parameter, with its values restored."""
        if self.is_rounded and self.original.numel() == 0:
            self.original.data = self.decode()
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
        matrix = self.matrix if self.is_rounded else make_dense_matrix(original)
        memo[id(self)] = other = self._with_matrix(matrix, original)
        if self.is_rounded:
            other.requires_grad_(self.requires_grad)
            other.grad = copy.deepcopy(self.grad, memo)
        return other

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickle the dense weight."""
        if not self.is_rounded:
            return _return_same, (self.original,)
        dense: Any = nn.Parameter(self.decode(), self.requires_grad)
        return dense.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.dense_shape)}, {self._matrix.format})"


@count_stored_nbytes.register(PackedWeight)
def _count_stored_nbytes(weight: PackedWeight) -> int:
    return weight.matrix.nbytes


def _return_same(original: Any) -> Any:
    return original


def make_dense_matrix(original: Tensor) -> DenseMatrix:
    """Return the matrix of a dense parameter, on the same memory."""
    values = original.detach()
    return DenseMatrix(values.flatten(0, -2) if _is_stack(values) else values)


def _is_stack(values: Tensor) -> bool:
    """Tell whether values [experts, out, in] are the rows of one matrix."""
    return values.ndim == 3 and values.is_contiguous()


def _is_at_memory(matrix: DenseMatrix, original: Tensor) -> bool:
    """Tell whether a matrix is where the original is: both may move with their storage."""
    layouts = ((x.dtype, x.numel(), x.stride()[-2:]) for x in (matrix.tensor, original))
    return matrix.address == original.data_ptr() and next(layouts) == next(layouts)


def _get_operand(weight: PackedWeight) -> Tensor:
    _refuse_compilers()
    return weight.operand


def _decode(weight: PackedWeight) -> Tensor:
    _refuse_compilers()
    return weight.decode()


def _refuse_compilers() -> None:
    """Raise CacheError inside a compiler, which then runs the call uncompiled."""
    if torch.compiler.is_compiling():
        raise CacheError("packed weights cannot be compiled: call kvant.unpack(model) first")


# Overrides have the parameter names of torch's functions.


def _compute_linear(input: Any, weight: Any, bias: Any = None) -> Tensor | None:  # noqa: A002
    """Compute `functional.linear` by a kernel, of rows of any dtype; None: it needs torch."""
    if type(weight) is not PackedWeight or weight.is_transposed or len(weight.dense_shape) != 2:
        return None
    return _multiply(input, weight, bias)


def _multiply(rows: Any, weight: PackedWeight, bias: Any) -> Tensor | None:
    """Multiply rows by all of a weight's matrix; None: it needs torch."""
    if not _needs_no_torch(rows, weight, bias):
        return None
    matrix = weight.matrix
    if not can_multiply(rows, matrix, bias):
        return None
    _refuse_compilers()
    return multiply(rows, matrix, bias)


def _needs_no_torch(rows: Any, weight: PackedWeight, bias: Any) -> bool:
    """Tell whether a kernel may compute a product: no gradient or transform is to see it."""
    if type(rows) is not Tensor or not _is_plain_forward(rows):
        return False
    if torch.is_grad_enabled() and any(
        operand is not None and operand.requires_grad for operand in (rows, weight, bias)
    ):
        return False
    return _is_kernel_weight(weight)


def _compute_addmm(
    input: Any,  # noqa: A002
    mat1: Any,
    mat2: Any,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Any = None,
) -> Tensor | None:
    """Compute `torch.addmm` with a transposed weight; None: it needs torch."""
    if type(mat2) is not PackedWeight or not mat2.is_transposed or out is not None:
        return None
    if len(mat2.dense_shape) != 2 or beta != 1 or alpha != 1 or mat1.ndim != 2:
        return None
    return _multiply(mat1, mat2, input)


def _take_rows(weight: Any, index: Any) -> Tensor | None:
    """Index a weight: return one expert packed, other rows dense; None: it needs torch."""
    if type(weight) is not PackedWeight or weight.is_transposed or is_transforming():
        return None
    if _needs_gradient(weight):
        return None
    if isinstance(index, slice) and weight.is_rounded:
        numbers = range(len(weight))[index]
        if len(numbers) * weight.dense_shape[-1] > SLICE_VALUES:
            return None
        index = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    is_tensor = type(index) is Tensor and index.dtype in (torch.int32, torch.int64)
    if not is_tensor and type(index) is not int:
        return None
    _refuse_compilers()
    if len(weight.dense_shape) == 3:
        return _take_experts(weight, index)
    if not weight.is_rounded or not is_tensor:
        return None
    return weight.matrix.take_rows(torch.where(index < 0, index + len(weight), index))


def _take_experts(weight: PackedWeight, index: Tensor | int) -> Tensor | None:
    if not weight.is_rounded and not _is_stack(weight.original):
        return None
    if isinstance(index, int) or index.ndim == 0:
        return _take_expert(weight, int(index))
    if not weight.is_rounded or index.ndim != 1 or not len(index):
        return None
    return torch.stack([_take_expert(weight, int(number)).decode() for number in index])


def _take_expert(weight: PackedWeight, expert: int) -> PackedWeight:
    count, *shape = weight.dense_shape
    if not -count <= expert < count:
        raise IndexError(f"expert {expert}: experts from 0 to {count - 1} exist")
    if weight.is_rounded:
        values = torch.empty(0, dtype=weight.dtype, device="cpu")
    else:
        values = weight.original.detach()[expert]
    original = nn.Parameter(values, requires_grad=False)
    matrix = take_group(weight.matrix, expert % count, count)
    return PackedWeight.from_matrix(matrix, original, torch.Size(shape))


def _transpose_experts(self: Any, dim0: Any, dim1: Any) -> Tensor | None:
    """Return all experts transposed, for `grouped_mm`; None: it needs torch."""
    weight = self
    if type(weight) is not PackedWeight or len(weight.dense_shape) != 3 or weight.is_transposed:
        return None
    if (dim0, dim1) not in LAST_TWO_DIMS or _needs_gradient(weight):
        return None
    experts, num_outputs, width = weight.dense_shape
    original = weight.original
    if not weight.is_rounded:
        if not _is_stack(original):
            return None
        original = nn.Parameter(original.detach().transpose(1, 2), requires_grad=False)
    shape = torch.Size((experts, width, num_outputs))
    return PackedWeight.from_matrix(weight.matrix, original, shape, is_transposed=True)


def _multiply_groups(
    self: Any, mat2: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Tensor | None:
    """Compute `functional.grouped_mm`: each group of rows by its expert; None: it needs torch."""
    rows, weight = self, mat2
    if type(weight) is not PackedWeight or len(weight.dense_shape) != 3 or offs is None:
        return None
    if not weight.is_transposed or bias is not None or out_dtype not in (None, rows.dtype):
        return None
    if rows.ndim != 2 or not _needs_no_torch(rows, weight, None):
        return None
    num_experts = weight.dense_shape[0]
    if not can_multiply(rows, take_group(weight.matrix, 0, num_experts), None):
        return None
    _refuse_compilers()
    return multiply_groups(rows, offs, weight.matrix, num_experts)


def _needs_gradient(weight: PackedWeight) -> bool:
    return weight.requires_grad and torch.is_grad_enabled()


def _is_kernel_weight(weight: PackedWeight) -> bool:
    """Tell whether the kernels read the weight; a dense one may have been converted since."""
    original = weight.original
    return weight.is_rounded or (
        original.dtype in DENSE_DTYPES
        and original.is_cpu
        and (original.is_contiguous() or weight.is_transposed)
    )


def _is_plain_forward(x: Tensor) -> bool:
    """Tell whether no transform of torch, nor a conversion by autocast, is to see a product."""
    if is_transforming() or is_dual_level_open():
        return False
    return not torch.is_autocast_enabled("cpu") or torch.get_autocast_dtype("cpu") == x.dtype


def _look_up_rows(
    input: Any,  # noqa: A002
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    *_: Any,
    **__: Any,
) -> Tensor | None:
    """Compute `functional.embedding` from codes; None: it needs torch."""
    if type(weight) is not PackedWeight or not weight.is_rounded or max_norm is not None:
        return None
    if type(input) is not Tensor or is_transforming() or is_dual_level_open():
        return None
    if _needs_gradient(weight):
        return None
    _refuse_compilers()
    return weight.matrix.take_rows(input)


def _get_data(weight: PackedWeight) -> Any:
    """Return a weight's `data`; a dense copy would lose what is written to it."""
    if not weight.is_rounded:
        return weight.original.data
    values = torch.empty(0, dtype=weight.dtype, device="cpu")
    original = nn.Parameter(values, requires_grad=False)
    return weight._with_matrix(weight.matrix, original)


def _set_data(weight: Any, value: Any) -> bool | None:
    if type(weight) is not PackedWeight:
        return None
    if value is weight:
        return True
    if weight.is_rounded:
        raise _make_refusal("assigning to the data")
    weight.original.data = value
    weight._matrix = make_dense_matrix(weight.original)  # frees the memory before
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
    torch._grouped_mm: _multiply_groups,  # called by functional.grouped_mm
    torch.addmm: _compute_addmm,
    torch.Tensor.__getitem__: _take_rows,
    torch.Tensor.transpose: _transpose_experts,
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
