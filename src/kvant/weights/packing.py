"""Pack the weights of linear layers for oneDNN, which otherwise packs them for every token.

A `PackedWeight` replaces the parameter and has no storage of its own. A linear layer multiplies
with the packed bytes; every other operation gets a dense copy. So modules, names, shapes and dtypes
do not change, and reads are correct. Writes raise an error, since they would only change the copy.
`pack` also fuses norms (norms.py).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_any, tree_map_only

from kvant.errors import CacheError
from kvant.platform.sizes import format_count, format_size
from kvant.platform.torch_runtime import is_dual_level_open, is_transforming, no_inference_mode
from kvant.weights import norms, packed_matrix
from kvant.weights.packed_matrix import PackedMatrix, SummationOrder

PACKABLE_DTYPES = (torch.bfloat16, torch.float16)
# Layers whose weight other code reads: every token would need a dense copy of it.
EXTERNALLY_READ_LAYERS = ("dt_proj", "kv_b_proj")  # Mamba; latent attention, by kvant.attach
MIN_PACKED_VALUES = 64 * 64 + 1  # for smaller weights torch has a faster path
WEIGHT_NAME = "weight"
ShapeKey = tuple[torch.Size, torch.dtype, bool]  # of a weight; True: no bias


@dataclass(frozen=True)
class Packing:
    """Which linear layers of a model are packed, and why others are not.

    >>> packing = kvant.pack(torch.nn.Sequential(torch.nn.Linear(128, 128)))  # of 32 bits
    >>> print(packing)
    0 linear layers packed, 0 B; left: 1 of float32
    """

    layers: tuple[str, ...]
    nbytes: int
    left: Mapping[str, str]
    nbytes_added: int = 0  # of weights that are also stored dense, in an embedding
    norms: int = 0  # number of fused norms

    def __str__(self) -> str:
        text = (
            f"{format_count(len(self.layers), 'linear layer')} packed, {format_size(self.nbytes)}"
        )
        if self.nbytes_added:
            text += f", {format_size(self.nbytes_added)} of it beside an embedding"
        if self.norms:
            text += f"; norms fused: {self.norms}"
        reasons = Counter(self.left.values()).most_common()
        left = ", ".join(f"{count} {reason}" for reason, count in reasons)
        return f"{text}; left: {left}" if left else text


def pack(model: nn.Module, *, tied: bool = False) -> Packing:
    """Pack 16-bit weights on a CPU, until `unpack`: faster, with the same outputs to the bit.

    RMSNorms are fused. Layers and norms whose outputs would change are left as they are. Dense
    weights are freed layer by layer. Under autograd a packed layer uses a dense copy. With `tied`,
    layers that share their weight with an embedding are packed too, which adds memory: the
    embedding retains the dense weight.

    >>> small = torch.nn.Sequential(torch.nn.Linear(128, 128).bfloat16())
    >>> x = torch.randn(1, 128).bfloat16()
    >>> before, packing = small(x), kvant.pack(small)
    >>> torch.equal(small(x), before)
    True
    """
    _check_model(model)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    trials: dict[ShapeKey, str | SummationOrder] = {}
    left: dict[str, str] = {}
    memory_counts = Counter(_get_memory_key(tensor) for tensor in _iterate_tensors(model))
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding) and tied]
    with no_inference_mode(), torch.no_grad():
        for name, layer in layers.items():
            weight = layer._parameters.get(WEIGHT_NAME)
            if isinstance(weight, PackedWeight):
                continue
            version = _get_version(weight) if isinstance(weight, Tensor) else None
            num_tied = sum(m.weight is weight for m in embeddings) if version else 0
            reason = _explain_unpackable(name, layer, memory_counts, 1 + num_tied)
            reason = reason or _pack_layer(layer, trials, version if num_tied else None)
            if reason is not None:
                left[name] = reason
        norm_trials: norms.TrialResults = {}
        fused = sum(norms.fuse_norm(module, norm_trials) for module in model.modules())
    packed = {name: layers[name].weight for name in layers if name not in left}
    nbytes = sum(weight.nbytes for weight in packed.values())
    added = sum(w.nbytes for w in packed.values() if isinstance(w, PackedWeight) and w.is_tied)
    return Packing(tuple(packed), nbytes, left, added, fused)


def is_packed(model: nn.Module) -> bool:
    """Tell whether any weight of the model is packed, or any norm fused."""
    return any(
        norms.is_fused(module)
        or any(isinstance(weight, PackedWeight) for weight in module._parameters.values())
        for module in model.modules()
    )


def unpack(model: nn.Module) -> int:
    """Restore a model's parameters and norms; return how many parameters were packed.

    >>> small = torch.nn.Sequential(torch.nn.Linear(128, 128).bfloat16())
    >>> packing = kvant.pack(small)
    >>> kvant.unpack(small) == len(packing.layers)
    True
    """
    _check_model(model)
    count = 0
    with no_inference_mode(), torch.no_grad():
        for module in model.modules():
            norms.unfuse_norm(module)
            for name, weight in module._parameters.items():
                if isinstance(weight, PackedWeight):
                    module._parameters[name] = weight.restore()
                    count += 1
    return count


def named_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter once, by name; packing a model does not change names or order."""
    seen = set[int]()
    for name, weight in model.named_parameters():
        is_tied = isinstance(weight, PackedWeight) and weight.is_tied
        parameter = cast(Any, weight).original if is_tied else weight
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield name, parameter


def get_weight_memory(tensor: Tensor) -> PackedMatrix | Tensor:
    """Return an object that keeps alive the memory which a weight's products read."""
    return tensor.matrix if isinstance(tensor, PackedWeight) else tensor.detach()


def get_weight_address(tensor: Tensor) -> object:
    """Return a value that changes when the memory of `get_weight_memory` changes."""
    if isinstance(tensor, PackedWeight):
        return id(tensor.matrix), tensor.is_current
    return tensor.data_ptr()


WeightVersion = tuple[int, int]
NO_VERSION: WeightVersion = (-1, 0)


def _get_version(weight: Tensor) -> WeightVersion | None:
    """Return the write count and the address of a weight; None if torch does not count writes."""
    try:
        return weight._version, weight.data_ptr()
    except RuntimeError:  # an inference tensor, or one without storage
        return None


class PackedWeight(torch.Tensor):
    """A linear layer's weight [out, in] whose bytes are packed in oneDNN's order."""

    _is_param = True  # so that isinstance(weight, nn.Parameter) holds

    matrix: PackedMatrix
    original: nn.Parameter | None  # emptied, unless tied; None for a weight's `data`
    version: WeightVersion | None  # of a tied original when it was packed; None: not tied

    @classmethod
    def from_matrix(
        cls,
        matrix: PackedMatrix,
        original: nn.Parameter | None,
        version: WeightVersion | None = None,
    ) -> PackedWeight:
        weight: PackedWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            matrix.shape,
            dtype=matrix.dtype,
            device=matrix.device,
            requires_grad=original is not None and original.requires_grad,
        )
        weight.__dict__.update({} if original is None else original.__dict__)
        weight.matrix, weight.original, weight.version = matrix, original, version
        return weight

    @property
    def is_tied(self) -> bool:
        """Whether an embedding shares the original."""
        return self.version is not None

    @property
    def is_current(self) -> bool:
        """Whether the packed bytes equal the original's."""
        return not self.is_tied or _get_version(cast(Tensor, self.original)) == self.version

    def restore(self) -> nn.Parameter:
        """Return the original parameter, with its values restored."""
        assert self.original is not None
        original = self.original
        if self.is_tied:
            return original
        original.data = self.matrix.to_dense()
        original.requires_grad_(self.requires_grad)
        original.grad = self.grad
        return original

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in FUNCTION_OVERRIDES and not kwargs:
            out = FUNCTION_OVERRIDES[func](*args)
            if out is not None:
                return out
        operands, options = tuple(args), dict(kwargs or {})
        if len(operands) == 1 and not options and type(operands[0]) is PackedWeight:
            operands = (_get_compute_weight(operands[0]),)  # reading an attribute: the common case
        else:
            operands, options = tree_map_only(
                PackedWeight, _get_compute_weight, (operands, options)
            )
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
            target = args[0]
            if (
                func is not torch.ops.aten.copy_.default
                or target.original is None
                or target.is_tied
            ):
                raise _make_refusal(str(func))
            value = args[1].to(target.matrix.device, target.matrix.dtype)
            target.matrix = PackedMatrix(
                value.expand(target.matrix.shape), target.matrix.summation_order
            )
            return target
        dense = tree_map_only(PackedWeight, _make_dense, (tuple(args), options))
        return func(*dense[0], **dense[1])

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        """Return a packed copy that shares the packed bytes, which are never written to."""
        original = copy.deepcopy(self.original, memo)
        if original is None or not self.is_tied:
            return PackedWeight.from_matrix(self.matrix, original)
        version = _get_version(original) if self.is_current else None
        return PackedWeight.from_matrix(self.matrix, original, version or NO_VERSION)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickle the dense weight."""
        if self.is_tied:
            return _same_object, (self.original,)
        dense: Any = nn.Parameter(_make_dense(self), self.requires_grad)
        return dense.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype})"


def _same_object(original: Any) -> Any:
    return original


def _get_compute_weight(weight: PackedWeight) -> Any:
    """Return the operand for other operations: the tied original, or the weight itself."""
    if weight.is_tied:
        _refuse_compilers()
        return weight.original
    return weight


def _make_dense(weight: PackedWeight) -> Tensor:
    _refuse_compilers()
    return weight.matrix.to_dense()


def _compute_linear(x: Any, weight: Any, bias: Any = None) -> Tensor | None:
    """Compute `functional.linear` with packed bytes; return None if a dense copy is needed."""
    if type(weight) is not PackedWeight or type(x) is not Tensor or not weight.is_current:
        return None
    if x.dtype != weight.matrix.dtype or not x.is_cpu or is_transforming() or is_dual_level_open():
        return None
    if bias is not None and not packed_matrix.is_readable_bias(weight.matrix, bias):
        return None
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") != x.dtype:
        return None
    if torch.is_grad_enabled() and any(
        operand is not None and operand.requires_grad for operand in (x, weight, bias)
    ):
        return None
    _refuse_compilers()
    return weight.matrix.multiply(x, bias)


def _refuse_compilers() -> None:
    """Raise CacheError inside a compiler, which then runs the call uncompiled."""
    if torch.compiler.is_compiling():
        raise CacheError("packed weights cannot be compiled: call kvant.unpack(model) first")


def _get_data(weight: PackedWeight) -> PackedWeight:
    """Return a weight's `data`: packed too, since writes to a dense copy would be lost."""
    return PackedWeight.from_matrix(weight.matrix if weight.is_current else _repack(weight), None)


def _copy_into_original(weight: Any, value: Any, *args: Any) -> Any:
    """Copy new values into a tied original, and pack it again."""
    if not isinstance(weight, PackedWeight) or not weight.is_tied:
        return None
    original = cast(Tensor, weight.original)
    original.copy_(value, *args)
    weight.matrix, weight.version = _repack(weight), _get_version(original)
    return weight


def _repack(weight: PackedWeight) -> PackedMatrix:
    return PackedMatrix(cast(Tensor, weight.original), weight.matrix.summation_order)


def _set_data(weight: Any, value: Any) -> bool:
    if value is not (weight.original if weight.is_tied else weight):
        raise _make_refusal("assigning to the data")
    return True


def _check_conversion(weight: Any, other: Any) -> bool:
    """Tell `nn.Module.to` whether a converted weight can stay in the same parameter."""
    if not weight.is_tied:
        return weight is other
    packed: PackedMatrix = weight.matrix
    if (other.dtype, other.device) != (packed.dtype, packed.device):
        raise _make_refusal("a conversion")  # it would separate the weight from its embedding
    return other is weight.original


def _make_refuser(operation: str) -> Callable[..., Any]:
    def refuse(*args: Any) -> Any:
        raise _make_refusal(operation)

    return refuse


def _make_refusal(operation: str) -> CacheError:
    return CacheError(
        f"{operation} of a packed weight: call kvant.unpack(model) first, then change the weight"
    )


# Functions that handle a packed weight themselves; None: use a dense copy.
FUNCTION_OVERRIDES: Mapping[Any, Callable[..., Any]] = {
    functional.linear: _compute_linear,
    torch.Tensor.data.__get__: _get_data,  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.Tensor.copy_: _copy_into_original,
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


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{type(model).__name__} is no model: a loaded torch.nn.Module is needed")


def _iterate_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield parameters and buffers, once for each module that holds them."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            yield from (tensor for tensor in tensors.values() if tensor is not None)


def _get_memory_key(tensor: Tensor) -> int:
    """Return a key that is equal for tensors which begin at the same byte."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return (tensor.data_ptr() if plain else 0) or id(tensor)


def _explain_unpackable(
    name: str, layer: nn.Linear, memory_counts: Mapping[int, int], num_holders: int
) -> str | None:
    """Return why a layer cannot be packed, or None. `num_holders` modules may hold its weight."""
    weight = layer._parameters.get(WEIGHT_NAME)
    if type(layer) is not nn.Linear:
        return f"of class {type(layer).__name__}"
    if type(weight) is not nn.Parameter:
        return "without a plain weight"
    if weight.dtype not in PACKABLE_DTYPES:
        return f"of {str(weight.dtype).removeprefix('torch.')}"
    if weight.device.type != "cpu":
        return f"on {weight.device}"
    if weight.numel() < MIN_PACKED_VALUES:
        return "too small"
    if name.rpartition(".")[2] in EXTERNALLY_READ_LAYERS:
        return "read by other code"
    return "tied" if memory_counts[_get_memory_key(weight)] > num_holders else None


def _pack_layer(
    layer: nn.Linear, trials: dict[ShapeKey, str | SummationOrder], version: WeightVersion | None
) -> str | None:
    """Pack a layer; return the reason if it cannot be packed. Each shape is tried once.

    With a `version`, the original is tied and retains its values.
    """
    weight, bias = layer._parameters[WEIGHT_NAME], layer.bias
    assert weight is not None
    if not packed_matrix.has_packing_operators():
        return f"unknown to torch {torch.__version__}"
    if bias is not None and not packed_matrix.is_readable_bias(weight, bias):
        return "with a bias that oneDNN does not read"
    shape = (weight.shape, weight.dtype, bias is None)
    matrix = None
    if shape not in trials:
        order = SummationOrder()
        try:
            matrix = PackedMatrix(weight, order)
            trials[shape] = (
                order if _gives_same_bits(layer, matrix) else "of other bits when packed"
            )
        except RuntimeError:  # unsupported by this processor or this torch
            trials[shape] = "refused by oneDNN"
    trial = trials[shape]
    if isinstance(trial, str):
        return trial
    packed = PackedWeight.from_matrix(matrix or PackedMatrix(weight, trial), weight, version)
    if version is None:
        packed.grad, weight.grad = weight.grad, None
    layer._parameters[WEIGHT_NAME] = cast(nn.Parameter, packed)
    if version is None:
        weight.data = weight.new_empty(0)  # last, so that an interrupt loses nothing
    return None


TRIAL_ROWS = (2, 16, 64)
MAX_TRIAL_VALUES = 2**16  # outputs: another summation order shows in one of some thousands


def _gives_same_bits(layer: nn.Linear, matrix: PackedMatrix) -> bool:
    """Tell whether packed products equal the layer's to the bit, for single rows and batches."""
    singles = min(64, 1 + MAX_TRIAL_VALUES // layer.out_features)
    generator = torch.Generator().manual_seed(0)
    for rows in (*[1] * singles, *TRIAL_ROWS):
        x = torch.randn(rows, layer.in_features, generator=generator, device="cpu")
        x = x.to(matrix.dtype)
        plain = functional.linear(x, layer.weight, layer.bias)
        if not torch.equal(plain, matrix.multiply(x, layer.bias)):
            return False
    return True
