"""Multiply with a model's weights by kvant's kernels: in 16 bits, or rounded to 8 or fewer.

A `PackedWeight` replaces the parameter of a linear layer, an embedding, or experts, or of layers
that share it (packed_weight.py). Modules, names, shapes and dtypes do not change. `pack` also fuses
norms (norms.py).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kvant.codecs.affine import Affine
from kvant.platform.devices import count_stored_nbytes
from kvant.platform.sizes import format_count, format_size
from kvant.platform.torch_runtime import no_inference_mode
from kvant.recipes import RAW_WEIGHTS, WeightFormats
from kvant.weights import norms
from kvant.weights.packed_matrix import (
    BLOCK_OUTPUTS,
    DENSE_DTYPES,
    CodedMatrix,
    explain_unreadable,
    multiply,
)
from kvant.weights.packed_weight import PackedWeight, make_dense_matrix

# Formats of rounded weights by name.
WEIGHT_CODECS = {f"affine{bits}": Affine(bits, 32) for bits in (8, 6, 5, 4, 3, 2)}
CODED_DTYPES = (*DENSE_DTYPES, torch.float32)  # of weights that can be rounded to codes
# Layers whose weight other code reads: every token would need a dense copy of it.
EXTERNALLY_READ_LAYERS = ("dt_proj", "kv_b_proj")  # Mamba; latent attention, by kvant.attach
MIN_PACKED_VALUES = 64 * 64 + 1  # for smaller weights the call takes longer than the product
WEIGHT_NAME = "weight"
NUM_PROBED_ROWS = 32


@dataclass(frozen=True)
class PackedLayer:
    """What the weight of a layer became."""

    format: str  # "bfloat16", "float16", or a codec such as "affine4"
    nbytes_before: int
    nbytes: int
    error: float | None = None  # of outputs on the probe, relative to their norm; None: no probe

    @property
    def is_rounded(self) -> bool:
        return self.format in WEIGHT_CODECS


@dataclass(frozen=True)
class Packing:
    """Which layers of a model are packed, and why others are not.

    >>> packing = kvant.pack(torch.nn.Sequential(torch.nn.Linear(128, 128)))  # of 32 bits
    >>> print(packing)
    0 layers packed, 0 B; left: 1 of float32
    >>> print(kvant.pack(torch.nn.Sequential(torch.nn.Linear(128, 128)), "affine8"))
    1 layer packed, 64 KiB -> 18 KiB in affine8
    """

    layers: Mapping[str, PackedLayer]
    left: Mapping[str, str]
    norms: int = 0  # number of fused norms

    @property
    def has_rounded_layers(self) -> bool:
        return any(layer.is_rounded for layer in self.layers.values())

    @property
    def nbytes_before(self) -> int:
        return sum(layer.nbytes_before for layer in self.layers.values())

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())

    def __str__(self) -> str:
        text = f"{format_count(len(self.layers), 'layer')} packed, "
        rounded = sorted({layer.format for layer in self.layers.values() if layer.is_rounded})
        if rounded:
            sizes = f"{format_size(self.nbytes_before)} -> {format_size(self.nbytes)}"
            text += f"{sizes} in {', '.join(rounded)}"
            errors = {name: layer.error or 0.0 for name, layer in self.layers.items()}
            if any(errors.values()):
                worst = max(errors, key=lambda name: errors[name])
                text += f"; largest error of outputs {errors[worst]:.2g} ({worst})"
        else:
            text += format_size(self.nbytes)
        if self.norms:
            text += f"; norms fused: {self.norms}"
        reasons = Counter(self.left.values()).most_common()
        left = ", ".join(f"{count} {reason}" for reason, count in reasons)
        return f"{text}; left: {left}" if left else text


def pack(
    model: nn.Module,
    weights: WeightFormats = RAW_WEIGHTS,
    *,
    probe: Tensor | None = None,
    tied: bool | None = None,
) -> Packing:
    """Multiply with the weights on a CPU by kvant's kernels, until `unpack`.

    In 16 bits nothing is copied, and outputs differ by rounding alone. `weights` names a format
    that weights are rounded to, which frees the dense ones layer by layer: "affine8" or "affine4"
    (also affine6, 5, 3, 2). Formats by pattern of layer names are a mapping, or text such as
    "lm_head=affine8,*=affine4"; the first pattern that matches counts. Embeddings are rounded too.
    One that shares its weight with a layer is kept once, so `tied` is deprecated. The experts of a
    mixture have the name of their parameter: "*.experts.down_proj".

    With a `probe`, the input of a forward such as token ids, each rounded linear layer's error of
    outputs is measured on it. RMSNorms are fused. Under autograd a layer uses its dense weight.

    >>> model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Linear(256, 128))
    >>> packing = kvant.pack(model, {"1": "affine8", "*": "affine4"})
    >>> [layer.format for layer in packing.layers.values()]
    ['affine4', 'affine8']
    """
    _check_model(model)
    if tied is not None:
        warnings.warn(
            "tied= is deprecated: layers that share a weight with an embedding are always packed",
            DeprecationWarning,
            stacklevel=2,
        )
    formats = _parse_formats(weights)
    holders = _find_weight_holders(model)
    _check_patterns(formats, [holder.name for group in holders for holder in group])
    _check_rounded(formats, holders)
    layers, left = dict[str, PackedLayer](), dict[str, str]()
    memory_counts = Counter(_get_memory_key(tensor) for tensor in _iterate_tensors(model))
    with no_inference_mode(), torch.no_grad():
        inputs = {} if probe is None else _capture_inputs(model, probe)
        for group in holders:
            name, weight = group[0].name, group[0].weight
            expected = linear(x, weight) if (x := inputs.get(name)) is not None else None
            format_name = _find_format(formats, group)
            packed = _pack_group(group, format_name, memory_counts)
            if isinstance(packed, PackedWeight):
                matrix, error = packed.matrix, None
                if x is not None and expected is not None and packed.is_rounded:
                    error = _compute_error(multiply(x, matrix, None), expected)
                layers[name] = PackedLayer(matrix.format, packed.nbytes, matrix.nbytes, error)
            else:
                # Embeddings are listed if they are to be rounded, and no layer stands for them.
                has_no_layer = isinstance(group[0].module, nn.Embedding)
                left |= {
                    holder.name: packed
                    for holder in group
                    if not isinstance(holder.module, nn.Embedding)
                    or (has_no_layer and format_name != RAW_WEIGHTS)
                }
        left |= _list_other_weights(model, holders)
        norm_trials: norms.TrialResults = {}
        fused = sum(norms.fuse_norm(module, norm_trials) for module in model.modules())
    return Packing(layers, left, fused)


def count_weight_nbytes(model: nn.Module, weights: WeightFormats = RAW_WEIGHTS) -> int:
    """Return the bytes of a model's parameters and buffers once it is packed.

    The model may be on the meta device, without memory. What `pack` refuses is refused here.
    """
    _check_model(model)
    formats, holders = _parse_formats(weights), _find_weight_holders(model)
    _check_patterns(formats, [holder.name for group in holders for holder in group])
    _check_rounded(formats, holders)
    memory_counts = Counter(_get_memory_key(tensor) for tensor in _iterate_tensors(model))
    nbytes = {id(tensor): count_stored_nbytes(tensor) for tensor in _iterate_tensors(model)}
    for group in holders:
        parameter, format_name = group[0].parameter, _find_format(formats, group)
        if isinstance(parameter, PackedWeight) or format_name == RAW_WEIGHTS:
            continue
        if _explain_unpackable(group, format_name, memory_counts) is None:
            shape, codec = _get_matrix_shape(group[0]), WEIGHT_CODECS[format_name]
            nbytes[id(parameter)] = CodedMatrix.count_nbytes(shape, codec)
    return sum(nbytes.values())


def is_packed(model: nn.Module) -> bool:
    """Tell whether any weight of the model is packed, or any norm fused."""
    return any(
        norms.is_fused(module)
        or any(isinstance(weight, PackedWeight) for weight in module._parameters.values())
        for module in model.modules()
    )


def unpack(model: nn.Module) -> int:
    """Restore a model's parameters and norms; return how many parameters were packed.

    Weights that were rounded stay rounded, of which a warning tells.

    >>> small = torch.nn.Sequential(torch.nn.Linear(128, 128).bfloat16())
    >>> packing = kvant.pack(small)
    >>> kvant.unpack(small) == len(packing.layers)
    True
    """
    _check_model(model)
    packed: dict[int, PackedWeight] = {}
    with no_inference_mode(), torch.no_grad():
        for module in model.modules():
            norms.unfuse_norm(module)
            for name, weight in module._parameters.items():
                if isinstance(weight, PackedWeight):
                    packed[id(weight)] = weight
                    module._parameters[name] = weight.restore()
    rounded = Counter(weight.matrix.format for weight in packed.values() if weight.is_rounded)
    if rounded:
        counts = ", ".join(f"{count} to {name}" for name, count in rounded.most_common())
        warnings.warn(f"unpacked weights keep their rounded values: {counts}", stacklevel=2)
    return len(packed)


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter once, by name; packing in 16 bits changes neither names nor order."""
    seen = set[int]()
    for name, weight in model.named_parameters():
        parameter = _get_parameter(weight)
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield name, parameter


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{type(model).__name__} is no model: a loaded torch.nn.Module is needed")


def _parse_formats(weights: Any) -> Mapping[str, str]:
    """Return formats by pattern; raise ValueError for an unknown one."""
    formats: dict[str, Any] = {"*": weights}
    if isinstance(weights, Mapping):
        formats = dict(weights)
    elif isinstance(weights, str) and "=" in weights:
        formats = {}
        for word in weights.split(","):
            pattern, _, name = (part.strip() for part in word.partition("="))
            if pattern in formats:
                raise ValueError(f"weights={weights!r}: {pattern!r} has two formats: give one")
            formats[pattern] = name
    for pattern, name in formats.items():
        if name != RAW_WEIGHTS and name not in WEIGHT_CODECS:
            place = "" if pattern == "*" else f" for {pattern!r}"
            known = ", ".join([RAW_WEIGHTS, *WEIGHT_CODECS])
            raise ValueError(f"weights={name!r}{place}: unknown; the formats are {known}")
    return formats


def _check_patterns(formats: Mapping[str, str], names: Iterable[str]) -> None:
    """Raise ValueError for a pattern that no layer matches: it is a mistake."""
    names = list(names)
    for pattern in formats:
        if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
            some = ", ".join(names[:3])
            raise ValueError(f"weights: no layer matches {pattern!r}; the layers are {some}, ...")


def _check_rounded(formats: Mapping[str, str], holders: Iterable[Holders]) -> None:
    """Raise ValueError for a layer that is rounded to another format already."""
    for group in holders:
        name, weight = group[0].name, group[0].weight
        if not isinstance(weight, PackedWeight) or not weight.is_rounded:
            continue
        if (wanted := _find_format(formats, group)) not in (RAW_WEIGHTS, weight.matrix.format):
            raise ValueError(
                f"weights: {name} is rounded to {weight.matrix.format}, not to {wanted}: load the "
                "model again to round it otherwise"
            )


class Holder(NamedTuple):
    """A module's parameter that may be packed."""

    name: str  # the layer's; of experts, the parameter's
    module: nn.Module
    key: str = WEIGHT_NAME

    @property
    def weight(self) -> Any:
        return self.module._parameters.get(self.key)

    @property
    def parameter(self) -> Any:
        """The weight, or the original of one that is packed in 16 bits."""
        return _get_parameter(self.weight)

    @property
    def is_transposed(self) -> bool:
        """Whether the parameter has a row for each input."""
        return is_conv1d(self.module)

    def replace(self, weight: Tensor) -> None:
        self.module._parameters[self.key] = cast(nn.Parameter, weight)


Holders = list[Holder]  # those that share a parameter


def _find_format(formats: Mapping[str, str], group: Holders) -> str:
    """Return the format of the first pattern that matches one of the layers."""
    for pattern, name in formats.items():
        if any(fnmatchcase(holder.name, pattern) for holder in group):
            return name
    return RAW_WEIGHTS


def is_conv1d(module: nn.Module) -> bool:
    """Tell whether a module is transformers' Conv1D, a linear layer with a transposed weight."""
    names = type(module).__module__, type(module).__name__
    return names == ("transformers.pytorch_utils", "Conv1D")


def _find_expert_keys(module: nn.Module) -> list[str]:
    """Return the parameters [experts, out, in] of transformers' experts."""
    if getattr(module, "is_transposed", True) or not hasattr(module, "has_gate"):
        return []
    return [
        key for key, weight in module._parameters.items() if weight is not None and weight.ndim == 3
    ]


def _capture_inputs(model: nn.Module, probe: Tensor) -> dict[str, Tensor]:
    """Return up to NUM_PROBED_ROWS rows of each linear layer that gets any in a forward."""
    inputs: dict[str, Tensor] = {}

    def capture(
        name: str, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
    ) -> None:
        x = args[0] if args else kwargs.get("input")
        if x is not None and x.numel():
            rows = x.detach().reshape(-1, x.shape[-1])
            inputs[name] = rows[:: max(1, len(rows) // NUM_PROBED_ROWS)][:NUM_PROBED_ROWS].clone()

    hooks = [
        module.register_forward_pre_hook(partial(capture, name), with_kwargs=True)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        model(probe)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs


def _compute_error(outputs: Tensor, expected: Tensor) -> float:
    difference = (outputs.float() - expected.float()).norm()
    return float(difference / expected.float().norm()) if difference else 0.0


def _find_weight_holders(model: nn.Module) -> list[Holders]:
    """Return linear layers, embeddings and experts, those together that share a weight."""
    groups: dict[int, Holders] = {}
    for name, module in model.named_modules():
        keys = _find_expert_keys(module)
        holders = [Holder(f"{name}.{key}".lstrip("."), module, key) for key in keys]
        if isinstance(module, nn.Linear | nn.Embedding) or is_conv1d(module):
            holders = [Holder(name, module)]
        for holder in holders:
            weight = holder.weight
            original = weight.original if isinstance(weight, PackedWeight) else weight
            groups.setdefault(id(module if original is None else original), []).append(holder)
    # A layer comes before an embedding that shares its weight.
    return [sorted(g, key=lambda h: isinstance(h.module, nn.Embedding)) for g in groups.values()]


def _list_other_weights(model: nn.Module, holders: Iterable[Holders]) -> dict[str, str]:
    """Return the other matrices of the model, with their module's class."""
    found = {(id(holder.module), holder.key) for group in holders for holder in group}
    return {
        f"{name}.{key}".lstrip("."): f"of class {type(module).__name__}"
        for name, module in model.named_modules()
        for key, weight in module._parameters.items()
        if weight is not None
        and weight.ndim > 1
        and weight.numel() >= MIN_PACKED_VALUES
        and (id(module), key) not in found
    }


def _iterate_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield parameters and buffers, once for each module that holds them."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            yield from (_get_parameter(x) for x in tensors.values() if x is not None)


def _get_parameter(tensor: Any) -> Any:
    """Return the original of a weight packed in 16 bits, which other modules may hold too."""
    return tensor.operand if isinstance(tensor, PackedWeight) else tensor


def _get_memory_key(tensor: Tensor) -> int:
    """Return a key that is equal for tensors which begin at the same byte."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return (tensor.data_ptr() if plain else 0) or id(tensor)


def _pack_group(
    group: Holders, format_name: str, memory_counts: Mapping[int, int]
) -> PackedWeight | str:
    """Pack the weight that layers share; return why it is left if it cannot be packed."""
    weight, parameter = group[0].weight, group[0].parameter
    if isinstance(parameter, PackedWeight):  # rounded
        return parameter
    reason = _explain_unpackable(group, format_name, memory_counts)
    if reason is None and parameter.is_meta:
        reason = f"on {parameter.device}"
    if isinstance(weight, PackedWeight):
        if reason is None and format_name == RAW_WEIGHTS:
            return weight
        if reason and _explain_unpackable(group, RAW_WEIGHTS, memory_counts) is None:
            return reason  # it stays in 16 bits
        for holder in group:
            holder.replace(parameter)
    return reason or _pack_weight(group, WEIGHT_CODECS.get(format_name))


def _explain_unpackable(
    group: Holders, format_name: str, memory_counts: Mapping[int, int]
) -> str | None:
    """Return why layers that share a weight cannot be packed, or None."""
    holder = group[0]
    layer, weight = holder.module, holder.parameter
    is_rounded = format_name != RAW_WEIGHTS
    if isinstance(layer, nn.Linear) and type(layer) is not nn.Linear:
        return f"of class {type(layer).__name__}"
    if type(weight) is not nn.Parameter:
        return "without a plain weight"
    if isinstance(layer, nn.Embedding) and not is_rounded:
        return "an embedding"
    if holder.is_transposed and not is_rounded:
        return f"of class {type(layer).__name__}"
    if weight.dtype not in (CODED_DTYPES if is_rounded else DENSE_DTYPES):
        return f"of {str(weight.dtype).removeprefix('torch.')}"
    if weight.device.type not in ("cpu", "meta"):  # plans count models on meta
        return f"on {weight.device}"
    # A small one that is packed was loaded so: its dtype may not be that of the model.
    if weight.numel() < MIN_PACKED_VALUES and (is_rounded or weight is holder.weight):
        return "too small"
    if not weight.is_contiguous():
        return "not contiguous"
    if holder.name.rpartition(".")[2] in EXTERNALLY_READ_LAYERS:
        return "read by other code"
    if is_rounded and memory_counts[_get_memory_key(weight)] > len(group):
        return "sharing its memory"
    if is_rounded and weight.ndim == 3 and weight.shape[1] % BLOCK_OUTPUTS:
        return f"of experts whose outputs are no multiple of {BLOCK_OUTPUTS}"
    return explain_unreadable(_get_matrix_shape(holder))


def _get_matrix_shape(holder: Holder) -> torch.Size:
    """Return [outputs, inputs]; of experts, the outputs of all."""
    shape = holder.parameter.shape
    if holder.is_transposed:
        return torch.Size((shape[1], shape[0]))
    return torch.Size((shape[:-1].numel(), shape[-1]))


def _pack_weight(group: Holders, codec: Affine | None) -> PackedWeight:
    """Replace the weight that layers share; with a codec, by its codes."""
    original, is_transposed = group[0].weight, group[0].is_transposed
    if codec is None:
        packed = PackedWeight.from_matrix(make_dense_matrix(original), original, original.shape)
    else:
        rows = original.t() if is_transposed else original.flatten(0, -2)
        packed = PackedWeight.from_matrix(
            CodedMatrix.encode(rows, codec), original, original.shape, is_transposed=is_transposed
        )
        packed.grad, original.grad = original.grad, None
    for holder in group:
        holder.replace(packed)
    if codec is not None:
        original.data = original.new_empty(0)  # last, so that an interrupt loses nothing
    return packed
