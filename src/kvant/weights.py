"""Weights of linear layers, packed once for oneDNN: else a CPU packs them anew for every token.

A packed weight stands in the place of the parameter and has no storage. A linear layer computes
with the packed bytes; any other operation is given a dense copy, so modules, names, shapes and
dtypes stay as they are, and whoever reads a weight is right. Whoever writes to one is refused: a
copy would take what is written, and be gone. Norms are fused beside them (norms.py).
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

from kvant import norms, packed_matrix
from kvant.errors import CacheError
from kvant.packed_matrix import PackedMatrix, SummationOrder
from kvant.sizes import format_count, format_size
from kvant.torch_modes import is_dual_level_open, is_transforming, no_inference_mode

PACKABLE_DTYPES = (torch.bfloat16, torch.float16)
# Layers whose weight other code multiplies with: it would have to be made dense for every token.
EXTERNALLY_READ_LAYERS = ("dt_proj", "kv_b_proj")  # of Mamba; of latent attention, by kvant.attach
MIN_PACKED_VALUES = 64 * 64 + 1  # values; for fewer torch has a way that is sooner done
WEIGHT_NAME = "weight"


@dataclass(frozen=True)
class Packing:
    """What is packed of a model, and why other linear layers are left as they are.

    >>> packing = kvant.pack(torch.nn.Sequential(torch.nn.Linear(128, 128)))  # of 32 bits
    >>> print(packing)
    0 linear layers packed, 0 B; left: 1 of float32
    """

    layers: tuple[str, ...]
    nbytes: int
    left: Mapping[str, str]
    nbytes_added: int = 0  # of weights that an embedding has as well
    norms: int = 0  # fused

    def __str__(self) -> str:
        told = (
            f"{format_count(len(self.layers), 'linear layer')} packed, {format_size(self.nbytes)}"
        )
        if self.nbytes_added:
            told += f", {format_size(self.nbytes_added)} of it beside an embedding"
        if self.norms:
            told += f"; norms fused: {self.norms}"
        reasons = Counter(self.left.values()).most_common()
        left = ", ".join(f"{count} {reason}" for reason, count in reasons)
        return f"{told}; left: {left}" if left else told


def pack(model: nn.Module, *, tied: bool = False) -> Packing:
    """Pack weights of 16 bits on a CPU, until `unpack`: the same outputs to the bit, sooner.

    Norms (RMSNorm) are fused. A layer, or a norm, is left alone where that does not hold. The
    memory of the weights is given back, one layer after the other. Under autograd a packed layer
    computes with a dense copy.
    `tied` packs a layer, too, whose weight is an embedding's: that one stays, so it takes memory.

    >>> small = torch.nn.Sequential(torch.nn.Linear(128, 128).bfloat16())
    >>> x = torch.randn(1, 128).bfloat16()
    >>> before, packing = small(x), kvant.pack(small)
    >>> torch.equal(small(x), before)
    True
    """
    _check_model(model)
    layers = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    tried: dict[Any, str | SummationOrder] = {}
    left: dict[str, str] = {}
    sharing = Counter(_get_memory_key(tensor) for tensor in _iterate_tensors(model))
    embeddings = [one for one in model.modules() if isinstance(one, nn.Embedding) and tied]
    with no_inference_mode(), torch.no_grad():
        for name, layer in layers.items():
            weight = layer._parameters.get(WEIGHT_NAME)
            if isinstance(weight, PackedWeight):
                continue
            version = _get_version(weight) if isinstance(weight, Tensor) else None
            others = sum(one.weight is weight for one in embeddings) if version else 0
            reason = _explain_unpackable(name, layer, sharing, 1 + others)
            reason = reason or _pack_layer(layer, tried, version if others else None)
            if reason is not None:
                left[name] = reason
        kinds: norms.TrialResults = {}
        fused = sum(norms.fuse_norm(module, kinds) for module in model.modules())
    made = {name: layers[name].weight for name in layers if name not in left}
    nbytes = sum(weight.nbytes for weight in made.values())
    added = sum(w.nbytes for w in made.values() if isinstance(w, PackedWeight) and w.is_tied)
    return Packing(tuple(made), nbytes, left, added, fused)


def is_packed(model: nn.Module) -> bool:
    """Is any weight of it packed, or any norm fused?"""
    return any(
        norms.is_fused(module)
        or any(isinstance(weight, PackedWeight) for weight in module._parameters.values())
        for module in model.modules()
    )


def unpack(model: nn.Module) -> int:
    """Give a model its own parameters and norms back; how many parameters were packed.

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
    """The parameters by name, each once: the same whether a model is packed or not."""
    seen = set[int]()
    for name, weight in model.named_parameters():
        stays = isinstance(weight, PackedWeight) and weight.is_tied
        one = cast(Any, weight).original if stays else weight
        if id(one) not in seen:
            seen.add(id(one))
            yield name, one


def get_weight_memory(tensor: Tensor) -> Any:
    """What to hold so that the memory stays which computing with a tensor reads."""
    return tensor.matrix if isinstance(tensor, PackedWeight) else tensor.detach()


def get_weight_address(tensor: Tensor) -> object:
    """Where that memory is: another value where it is another."""
    if isinstance(tensor, PackedWeight):
        return id(tensor.matrix), tensor.is_current
    return tensor.data_ptr()


WeightVersion = tuple[int, int]
NO_VERSION: WeightVersion = (-1, 0)


def _get_version(weight: Tensor) -> WeightVersion | None:
    """How often a weight was written to, and where it lies; None where nobody counts."""
    try:
        return weight._version, weight.data_ptr()
    except RuntimeError:  # made in inference mode, or without memory
        return None


class PackedWeight(torch.Tensor):
    """The weight of a linear layer, [out, in], in the order in which oneDNN reads it."""

    _is_param = True  # a parameter to `isinstance`

    matrix: PackedMatrix
    original: nn.Parameter | None  # empty, unless it `stays`; None of a weight's `data`
    version: WeightVersion | None  # of an original that stays, as it was packed

    @classmethod
    def from_matrix(
        cls,
        matrix: PackedMatrix,
        original: nn.Parameter | None,
        version: WeightVersion | None = None,
    ) -> PackedWeight:
        made: PackedWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            matrix.shape,
            dtype=matrix.dtype,
            device=matrix.device,
            requires_grad=original is not None and original.requires_grad,
        )
        made.__dict__.update({} if original is None else original.__dict__)
        made.matrix, made.original, made.version = matrix, original, version
        return made

    @property
    def is_tied(self) -> bool:
        """Is the original another module's as well?"""
        return self.version is not None

    @property
    def is_current(self) -> bool:
        """Are the packed bytes those of the original?"""
        return not self.is_tied or _get_version(cast(Tensor, self.original)) == self.version

    def restore(self) -> nn.Parameter:
        """The parameter that was there before."""
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
        own, named = tuple(args), dict(kwargs or {})
        if len(own) == 1 and not named and type(own[0]) is PackedWeight:  # of an attribute
            own = (_get_compute_weight(own[0]),)
        else:
            own, named = tree_map_only(PackedWeight, _get_compute_weight, (own, named))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*own, **named)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if _writes_packed_weight(func, args, named):
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
        real = tree_map_only(PackedWeight, _make_dense, (tuple(args), named))
        return func(*real[0], **real[1])

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        """Packed as well: the bytes are never written to, so both read the same."""
        original = copy.deepcopy(self.original, memo)
        if original is None or not self.is_tied:
            return PackedWeight.from_matrix(self.matrix, original)
        version = _get_version(original) if self.is_current else None
        return PackedWeight.from_matrix(self.matrix, original, version or NO_VERSION)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """What is written to a file is dense."""
        if self.is_tied:
            return _same_object, (self.original,)
        dense: Any = nn.Parameter(_make_dense(self), self.requires_grad)
        return dense.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype})"


def _same_object(original: Any) -> Any:
    return original


def _get_compute_weight(weight: PackedWeight) -> Any:
    """What is computed with in its place: an original that stays, or itself."""
    if weight.is_tied:
        _refuse_compilers()
        return weight.original
    return weight


def _make_dense(weight: PackedWeight) -> Tensor:
    _refuse_compilers()
    return weight.matrix.to_dense()


def _compute_linear(x: Any, weight: Any, bias: Any = None) -> Tensor | None:
    """`functional.linear` with packed bytes, or None where a dense copy is needed."""
    if type(weight) is not PackedWeight or type(x) is not Tensor or not weight.is_current:
        return None
    if x.dtype != weight.matrix.dtype or not x.is_cpu or is_transforming() or is_dual_level_open():
        return None
    if bias is not None and not packed_matrix.is_readable_bias(weight.matrix, bias):
        return None
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") != x.dtype:
        return None
    if torch.is_grad_enabled() and any(
        one is not None and one.requires_grad for one in (x, weight, bias)
    ):
        return None
    _refuse_compilers()
    return weight.matrix.multiply(x, bias)


def _refuse_compilers() -> None:
    """A compiler that came as far as this gives the call up and makes it as it is."""
    if torch.compiler.is_compiling():
        raise CacheError("packed weights are not compiled: kvant.unpack(model) first")


def _get_data(weight: PackedWeight) -> PackedWeight:
    """The same weight beside autograd; not a copy, which would take what is written to it."""
    return PackedWeight.from_matrix(weight.matrix if weight.is_current else _repack(weight), None)


def _copy_into_original(weight: Any, value: Any, *args: Any) -> Any:
    """Write another state to an original that stays, and pack it again."""
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
    """Asked by `nn.Module.to`, which makes a new parameter of what was converted then."""
    if not weight.is_tied:
        return weight is other
    packed: PackedMatrix = weight.matrix
    if (other.dtype, other.device) != (packed.dtype, packed.device):
        raise _make_refusal("a conversion")  # the new one would no longer be the embedding's
    return other is weight.original


def _make_refuser(operation: str) -> Callable[..., Any]:
    def refuse(*args: Any) -> Any:
        raise _make_refusal(operation)

    return refuse


def _make_refusal(operation: str) -> CacheError:
    return CacheError(
        f"{operation} of a packed weight: kvant.unpack(model) first, for one that can be changed"
    )


# What is answered otherwise than by a dense copy; no answer is None.
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
    """Does an operator write to a packed weight?"""
    if not func._schema.is_mutable:
        return False
    written = [
        args[place] if place < len(args) else kwargs.get(taken.name)
        for place, taken in enumerate(func._schema.arguments)
        if taken.alias_info is not None and taken.alias_info.is_write
    ]
    return bool(tree_any(lambda one: isinstance(one, PackedWeight), written))


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{type(model).__name__} is no model: a loaded torch.nn.Module is needed")


def _iterate_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Every one as often as a module holds it."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            yield from (tensor for tensor in held.values() if tensor is not None)


def _get_memory_key(tensor: Tensor) -> int:
    """The same for tensors that begin at the same byte; some have no address."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return (tensor.data_ptr() if plain else 0) or id(tensor)


def _explain_unpackable(
    name: str, layer: nn.Linear, memory_counts: Mapping[int, int], num_holders: int
) -> str | None:
    """Why a layer is not packed, as far as it shows; so many modules may hold its weight."""
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
    layer: nn.Linear, trials: dict[Any, str | SummationOrder], version: WeightVersion | None
) -> str | None:
    """Pack a layer, or say why not; layers of one shape are tried once.

    An original that has a `version` stays.
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
        except RuntimeError:  # of this processor, or of this torch
            trials[shape] = "refused by oneDNN"
    found = trials[shape]
    if isinstance(found, str):
        return found
    made = PackedWeight.from_matrix(matrix or PackedMatrix(weight, found), weight, version)
    if version is None:
        made.grad, weight.grad = weight.grad, None
    layer._parameters[WEIGHT_NAME] = cast(nn.Parameter, made)
    if version is None:
        weight.data = weight.new_empty(0)  # last: an interrupt before it loses nothing
    return None


TRIAL_ROWS = (2, 16, 64)
MAX_TRIAL_VALUES = 2**16  # of single rows: another order of sums shows in one of some thousand


def _gives_same_bits(layer: nn.Linear, matrix: PackedMatrix) -> bool:
    """Are the outputs those of the layer, to the bit? Of many single rows, and of some together."""
    singles = min(64, 1 + MAX_TRIAL_VALUES // layer.out_features)
    generator = torch.Generator().manual_seed(0)
    for rows in (*[1] * singles, *TRIAL_ROWS):
        x = torch.randn(rows, layer.in_features, generator=generator, device="cpu")
        x = x.to(matrix.dtype)
        plain = functional.linear(x, layer.weight, layer.bias)
        if not torch.equal(plain, matrix.multiply(x, layer.bias)):
            return False
    return True
