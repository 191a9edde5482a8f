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

from kvant import norms, packed
from kvant.errors import CacheError
from kvant.modes import dual, no_inference_mode, transformed
from kvant.packed import Order, PackedMatrix
from kvant.sizes import counted, format_size

DTYPES = (torch.bfloat16, torch.float16)
# Layers whose weight other code multiplies with: it would have to be made dense for every token.
READ_BY_OTHERS = ("dt_proj", "kv_b_proj")  # of Mamba; of latent attention, by kvant.attach
SMALLEST = 64 * 64 + 1  # values; for fewer torch has a way that is sooner done
WEIGHT = "weight"


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
        told = f"{counted(len(self.layers), 'linear layer')} packed, {format_size(self.nbytes)}"
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
    tried: dict[Any, str | Order] = {}
    left: dict[str, str] = {}
    sharing = Counter(_memory(tensor) for tensor in _tensors(model))
    embeddings = [one for one in model.modules() if isinstance(one, nn.Embedding) and tied]
    with no_inference_mode(), torch.no_grad():
        for name, layer in layers.items():
            weight = layer._parameters.get(WEIGHT)
            if isinstance(weight, PackedWeight):
                continue
            version = _version(weight) if isinstance(weight, Tensor) else None
            others = sum(one.weight is weight for one in embeddings) if version else 0
            reason = _unfit(name, layer, sharing, 1 + others)
            reason = reason or _pack_layer(layer, tried, version if others else None)
            if reason is not None:
                left[name] = reason
        kinds: norms.Tried = {}
        fused = sum(norms.fuse(module, kinds) for module in model.modules())
    made = {name: layers[name].weight for name in layers if name not in left}
    nbytes = sum(weight.nbytes for weight in made.values())
    added = sum(w.nbytes for w in made.values() if isinstance(w, PackedWeight) and w.stays)
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
            norms.part(module)
            for name, weight in module._parameters.items():
                if isinstance(weight, PackedWeight):
                    module._parameters[name] = weight.restored()
                    count += 1
    return count


def named_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters by name, each once: the same whether a model is packed or not."""
    seen = set[int]()
    for name, weight in model.named_parameters():
        stays = isinstance(weight, PackedWeight) and weight.stays
        one = cast(Any, weight).original if stays else weight
        if id(one) not in seen:
            seen.add(id(one))
            yield name, one


def memory(tensor: Tensor) -> Any:
    """What to hold so that the memory stays which computing with a tensor reads."""
    return tensor.packed if isinstance(tensor, PackedWeight) else tensor.detach()


def place(tensor: Tensor) -> object:
    """Where that memory is: another value where it is another."""
    if isinstance(tensor, PackedWeight):
        return id(tensor.packed), tensor.current
    return tensor.data_ptr()


Version = tuple[int, int]
NEVER: Version = (-1, 0)


def _version(weight: Tensor) -> Version | None:
    """How often a weight was written to, and where it lies; None where nobody counts."""
    try:
        return weight._version, weight.data_ptr()
    except RuntimeError:  # made in inference mode, or without memory
        return None


class PackedWeight(torch.Tensor):
    """The weight of a linear layer, [out, in], in the order in which oneDNN reads it."""

    _is_param = True  # a parameter to `isinstance`

    packed: PackedMatrix
    original: nn.Parameter | None  # empty, unless it `stays`; None of a weight's `data`
    version: Version | None  # of an original that stays, as it was packed

    @classmethod
    def of(
        cls, packed: PackedMatrix, original: nn.Parameter | None, version: Version | None = None
    ) -> PackedWeight:
        made: PackedWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            packed.shape,
            dtype=packed.dtype,
            device=packed.device,
            requires_grad=original is not None and original.requires_grad,
        )
        made.__dict__.update({} if original is None else original.__dict__)
        made.packed, made.original, made.version = packed, original, version
        return made

    @property
    def stays(self) -> bool:
        """Is the original another module's as well?"""
        return self.version is not None

    @property
    def current(self) -> bool:
        """Are the packed bytes those of the original?"""
        return not self.stays or _version(cast(Tensor, self.original)) == self.version

    def restored(self) -> nn.Parameter:
        """The parameter that was there before."""
        assert self.original is not None
        original = self.original
        if self.stays:
            return original
        original.data = self.packed.dense()
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
        if func in ANSWERS and not kwargs:
            out = ANSWERS[func](*args)
            if out is not None:
                return out
        own, named = tuple(args), dict(kwargs or {})
        if len(own) == 1 and not named and type(own[0]) is PackedWeight:  # of an attribute
            own = (_original(own[0]),)
        else:
            own, named = tree_map_only(PackedWeight, _original, (own, named))
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
        if _writes(func, args, named):
            target = args[0]
            if func is not torch.ops.aten.copy_.default or target.original is None or target.stays:
                raise _refusal(str(func))
            value = args[1].to(target.packed.device, target.packed.dtype)
            target.packed = PackedMatrix(value.expand(target.packed.shape), target.packed.order)
            return target
        real = tree_map_only(PackedWeight, _dense, (tuple(args), named))
        return func(*real[0], **real[1])

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        """Packed as well: the bytes are never written to, so both read the same."""
        original = copy.deepcopy(self.original, memo)
        if original is None or not self.stays:
            return PackedWeight.of(self.packed, original)
        version = _version(original) if self.current else None
        return PackedWeight.of(self.packed, original, version or NEVER)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """What is written to a file is dense."""
        if self.stays:
            return _same_object, (self.original,)
        dense: Any = nn.Parameter(_dense(self), self.requires_grad)
        return dense.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype})"


def _same_object(found: Any) -> Any:
    return found


def _original(weight: PackedWeight) -> Any:
    """What is computed with in its place: an original that stays, or itself."""
    if weight.stays:
        _leave_compilers()
        return weight.original
    return weight


def _dense(weight: PackedWeight) -> Tensor:
    _leave_compilers()
    return weight.packed.dense()


def _linear(x: Any, weight: Any, bias: Any = None) -> Tensor | None:
    """`functional.linear` with packed bytes, or None where a dense copy is needed."""
    if type(weight) is not PackedWeight or type(x) is not Tensor or not weight.current:
        return None
    if x.dtype != weight.packed.dtype or not x.is_cpu or transformed() or dual():
        return None
    if bias is not None and not packed.reads(weight.packed, bias):
        return None
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") != x.dtype:
        return None
    if torch.is_grad_enabled() and any(
        one is not None and one.requires_grad for one in (x, weight, bias)
    ):
        return None
    _leave_compilers()
    return weight.packed.times(x, bias)


def _leave_compilers() -> None:
    """A compiler that came as far as this gives the call up and makes it as it is."""
    if torch.compiler.is_compiling():
        raise CacheError("packed weights are not compiled: kvant.unpack(model) first")


def _data(weight: PackedWeight) -> PackedWeight:
    """The same weight beside autograd; not a copy, which would take what is written to it."""
    return PackedWeight.of(weight.packed if weight.current else _packed_again(weight), None)


def _copied(weight: Any, value: Any, *more: Any) -> Any:
    """Write another state to an original that stays, and pack it again."""
    if not isinstance(weight, PackedWeight) or not weight.stays:
        return None
    original = cast(Tensor, weight.original)
    original.copy_(value, *more)
    weight.packed, weight.version = _packed_again(weight), _version(original)
    return weight


def _packed_again(weight: PackedWeight) -> PackedMatrix:
    return PackedMatrix(cast(Tensor, weight.original), weight.packed.order)


def _set_data(weight: Any, value: Any) -> bool:
    if value is not (weight.original if weight.stays else weight):
        raise _refusal("assigning to the data")
    return True


def _converted(weight: Any, other: Any) -> bool:
    """Asked by `nn.Module.to`, which makes a new parameter of what was converted then."""
    if not weight.stays:
        return weight is other
    packed: PackedMatrix = weight.packed
    if (other.dtype, other.device) != (packed.dtype, packed.device):
        raise _refusal("a conversion")  # the new one would no longer be the embedding's
    return other is weight.original


def _refused(what: str) -> Callable[..., Any]:
    def refuse(*args: Any) -> Any:
        raise _refusal(what)

    return refuse


def _refusal(what: str) -> CacheError:
    return CacheError(
        f"{what} of a packed weight: kvant.unpack(model) first, for one that can be changed"
    )


# What is answered otherwise than by a dense copy; no answer is None.
ANSWERS: Mapping[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    torch.Tensor.data.__get__: _data,  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.Tensor.copy_: _copied,
    torch.Tensor.__setitem__: _refused("writing to rows"),
    torch.Tensor.data_ptr: _refused("the address"),
    torch._has_compatible_shallow_copy_type: _converted,
}


def _writes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
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


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Every one as often as a module holds it."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            yield from (tensor for tensor in held.values() if tensor is not None)


def _memory(tensor: Tensor) -> int:
    """The same for tensors that begin at the same byte; some have no address."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return (tensor.data_ptr() if plain else 0) or id(tensor)


def _unfit(name: str, layer: nn.Linear, sharing: Mapping[int, int], holders: int) -> str | None:
    """Why a layer is not packed, as far as it shows; so many modules may hold its weight."""
    weight = layer._parameters.get(WEIGHT)
    if type(layer) is not nn.Linear:
        return f"of class {type(layer).__name__}"
    if type(weight) is not nn.Parameter:
        return "without a plain weight"
    if weight.dtype not in DTYPES:
        return f"of {str(weight.dtype).removeprefix('torch.')}"
    if weight.device.type != "cpu":
        return f"on {weight.device}"
    if weight.numel() < SMALLEST:
        return "too small"
    if name.rpartition(".")[2] in READ_BY_OTHERS:
        return "read by other code"
    return "tied" if sharing[_memory(weight)] > holders else None


def _pack_layer(
    layer: nn.Linear, tried: dict[Any, str | Order], version: Version | None
) -> str | None:
    """Pack a layer, or say why not; layers of one shape are tried once.

    An original that has a `version` stays.
    """
    weight, bias = layer._parameters[WEIGHT], layer.bias
    assert weight is not None
    if not packed.known():
        return f"unknown to torch {torch.__version__}"
    if bias is not None and not packed.reads(weight, bias):
        return "with a bias that oneDNN does not read"
    shape = (weight.shape, weight.dtype, bias is None)
    matrix = None
    if shape not in tried:
        order = Order()
        try:
            matrix = PackedMatrix(weight, order)
            tried[shape] = order if _same(layer, matrix) else "of other bits when packed"
        except RuntimeError:  # of this processor, or of this torch
            tried[shape] = "refused by oneDNN"
    found = tried[shape]
    if isinstance(found, str):
        return found
    made = PackedWeight.of(matrix or PackedMatrix(weight, found), weight, version)
    if version is None:
        made.grad, weight.grad = weight.grad, None
    layer._parameters[WEIGHT] = cast(nn.Parameter, made)
    if version is None:
        weight.data = weight.new_empty(0)  # last: an interrupt before it loses nothing
    return None


ROWS = (2, 16, 64)
VALUES = 2**16  # of single rows: another order of sums shows in one of some thousand


def _same(layer: nn.Linear, matrix: PackedMatrix) -> bool:
    """Are the outputs those of the layer, to the bit? Of many single rows, and of some together."""
    singles = min(64, 1 + VALUES // layer.out_features)
    generator = torch.Generator().manual_seed(0)
    for rows in (*[1] * singles, *ROWS):
        x = torch.randn(rows, layer.in_features, generator=generator, device="cpu")
        x = x.to(matrix.dtype)
        plain = functional.linear(x, layer.weight, layer.bias)
        if not torch.equal(plain, matrix.times(x, layer.bias)):
            return False
    return True
