"""Load an adapter from a folder of PEFT: adapter_config.json and adapter_model.safetensors.

Nothing is trusted. safetensors checks its header against the size of the file; names, shapes and
dtypes are checked against the model before a tensor is read. PEFT is not imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from kvant.adapters.adapter import Adapter, LowRankProduct
from kvant.adapters.lora_config import LoraConfig, read_config
from kvant.errors import AdapterError
from kvant.platform.paths import expand_path
from kvant.platform.torch_runtime import no_inference_mode
from kvant.weights.packing import EXTERNALLY_READ_LAYERS, is_conv1d

WEIGHTS_NAME = "adapter_model.safetensors"
TENSOR_NAME = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")
TENSOR_DTYPES = ("F32", "F16", "BF16")  # as safetensors names them
# A name is sent by clients and is no path.
ADAPTER_NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
MAX_SHOWN = 120  # characters of a name in an error


class StoredTensor(NamedTuple):
    """A tensor of a file, as its header describes it."""

    dtype: str
    shape: tuple[int, ...]


StoredLayers = dict[str, dict[str, StoredTensor]]  # by layer and side


def load_adapters(paths: Mapping[str, str | PathLike[str]], model: nn.Module) -> dict[str, Adapter]:
    """Load adapters by name; raise AdapterError for one that is invalid or does not fit.

    Names of equal adapters share one.
    """
    _check_names(paths)
    by_key = dict[str, Adapter]()
    adapters = dict[str, Adapter]()
    for name, path in paths.items():
        with _naming(name):
            adapter = load_adapter(path, model)
        adapters[name] = by_key.setdefault(adapter.key, adapter)
    return adapters


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Name the adapter in an error."""
    try:
        yield
    except AdapterError as error:
        raise AdapterError(f"adapter {name!r}: {error}") from error


def _check_names(names: Iterable[str]) -> None:
    """Raise AdapterError unless clients can send these names as those of models."""
    for name in names:
        if not ADAPTER_NAME.fullmatch(name):
            raise AdapterError(
                f"adapter name {_show(name)}: up to 128 letters, digits and . _ : / - are "
                "allowed, a letter or digit first, without '..'"
            )


def _show(name: str) -> str:
    return repr(name[:MAX_SHOWN])


def check_adapters(paths: Mapping[str, str | PathLike[str]]) -> None:
    """Check names, configurations and headers of adapters, before their model is loaded."""
    _check_names(paths)
    for name, path in paths.items():
        with _naming(name):
            folder = _find_folder(path)
            read_config(folder)
            with _open_weights(folder) as file:
                _list_layers(file)


def _find_folder(path: str | PathLike[str]) -> Path:
    """Return a folder, with the home of a user in place of `~`."""
    try:
        return expand_path(path)
    except ValueError as error:
        raise AdapterError(str(error)) from error


def find_adapter(adapters: Mapping[str, Adapter], name: str | None) -> Adapter | None:
    """Return the adapter of this name, or None for None; raise ValueError for an unknown name."""
    if name is not None and name not in adapters:
        known = ", ".join(adapters) or "none"
        raise ValueError(f"adapter {name!r}: unknown; this engine's adapters: {known}")
    return None if name is None else adapters[name]


def load_adapter(path: str | PathLike[str], model: nn.Module) -> Adapter:
    """Load the adapter in a folder for a model; raise AdapterError if it does not fit."""
    folder, modules = _find_folder(path), dict(model.named_modules())
    config = read_config(folder)
    with _open_weights(folder) as file, no_inference_mode(), torch.no_grad():
        layers = _list_layers(file)
        _check_layers(layers, config, modules)
        names = sorted(layers)
        ranks = config.find_ranks(names)
        scales = config.find_scales(ranks)
        for name in names:
            _check_shapes(name, layers[name], modules[name], ranks[name])
        hasher, products = blake2b(digest_size=32), dict[str, LowRankProduct]()
        for name in names:
            down, up = (_read_tensor(file, name, side) for side in "AB")
            hasher.update(json.dumps([name, scales[name], layers[name]], sort_keys=True).encode())
            for tensor in (down, up):
                hasher.update(tensor.contiguous().view(torch.uint8).numpy().data)
            weight = _get_weight(modules[name])
            products[name] = _make_product(name, down, up, scales[name], weight)
    return Adapter(hasher.hexdigest(), products)


@contextmanager
def _open_weights(folder: Path) -> Iterator[Any]:
    """Open the tensors of an adapter; errors name the file, in one line."""
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        raise AdapterError(f"{folder}: there is no {WEIGHTS_NAME}: save the adapter with PEFT")
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise AdapterError(f"{path} is corrupt or incomplete: {_show(str(error))}") from error
    except (MemoryError, OSError, RuntimeError, ValueError) as error:
        raise AdapterError(f"{folder}: {error}") from error


def _list_layers(file: Any) -> StoredLayers:
    """Return the tensors of a file by layer and side; raise ValueError for any other tensor."""
    layers: StoredLayers = {}
    for name in file.keys():  # noqa: SIM118
        match = TENSOR_NAME.fullmatch(name)
        if match is None:
            raise ValueError(
                f"tensor {_show(name)}: only base_model.model.LAYER.lora_A.weight and lora_B are "
                "supported; PEFT omits weights of the model with save_embedding_layers=False"
            )
        stored = file.get_slice(name)
        tensor = StoredTensor(stored.get_dtype(), tuple(stored.get_shape()))
        if tensor.dtype not in TENSOR_DTYPES:
            known = ", ".join(TENSOR_DTYPES)
            raise ValueError(f"tensor {_show(name)} is of {tensor.dtype}: {known} are supported")
        layers.setdefault(match["layer"], {})[match["side"]] = tensor
    for name, sides in layers.items():
        if len(sides) < 2:
            raise ValueError(f"layer {_show(name)} has lora_{next(iter(sides))} alone")
    if not layers:
        raise ValueError("it has no tensors")
    return layers


def _check_layers(
    layers: StoredLayers, config: LoraConfig, modules: Mapping[str, nn.Module]
) -> None:
    """Raise ValueError unless these are the model's layers that the configuration names."""
    if any(module._compiled_call_impl is not None for module in modules.values()):
        raise ValueError("the model is compiled: adapters need a model that is not")
    for name in layers:
        if name not in modules:
            raise ValueError(f"layer {_show(name)}: {type(modules['']).__name__} has none")
    targets = config.find_targets([name for name in modules if name])
    if others := sorted(layers.keys() ^ targets):
        fault = "has tensors, but is no" if others[0] in layers else "has no tensors, but is a"
        raise ValueError(
            f"layer {_show(others[0])} {fault} target of target_modules="
            f"{short(config.target_modules)}"
        )
    for name in layers:
        if (reason := _explain_unsupported(name, modules)) is not None:
            raise ValueError(f"layer {_show(name)} is {reason}: linear layers are supported")


def _explain_unsupported(name: str, modules: Mapping[str, nn.Module]) -> str | None:
    """Return why a layer cannot have an adapter; None if it can."""
    module = modules[name]
    if not _is_linear(module):
        return f"of class {type(module).__name__}"
    if name.rpartition(".")[2] in EXTERNALLY_READ_LAYERS:
        return "read by other code"
    weight, linear = _get_weight(module), filter(_is_linear, modules.values())
    if sum(_get_weight(other) is weight for other in linear) > 1:
        return "sharing its weight with another layer"
    return None


def _get_weight(module: nn.Module) -> Tensor:
    """Return the weight of a linear layer."""
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or is_conv1d(module)


def _check_shapes(
    name: str, sides: Mapping[str, StoredTensor], module: nn.Module, rank: int
) -> None:
    shape = _get_weight(module).shape
    outputs, inputs = reversed(shape) if is_conv1d(module) else shape
    for side, needed in (("A", (rank, inputs)), ("B", (outputs, rank))):
        if sides[side].shape != needed:
            raise ValueError(
                f"lora_{side} of {_show(name)} is {list(sides[side].shape)}: {list(needed)} is "
                f"needed, for r={rank} and this model"
            )


def _read_tensor(file: Any, name: str, side: str) -> Tensor:
    tensor: Tensor = file.get_tensor(f"base_model.model.{name}.lora_{side}.weight")
    if not tensor.isfinite().all():
        raise ValueError(f"lora_{side} of {_show(name)} has values that are not finite")
    return tensor


def _make_product(
    name: str, down: Tensor, up: Tensor, scale: float, weight: Tensor
) -> LowRankProduct:
    """Return the product on the device of a layer's weight."""
    dtype = torch.float32 if weight.device.type == "cpu" else weight.dtype
    scaled = (up.float() * scale).to(weight.device, dtype)
    product = LowRankProduct(down.to(weight.device, dtype, copy=True), scaled)
    if not (product.down.isfinite().all() and scaled.isfinite().all()):
        raise ValueError(f"the product of {_show(name)} exceeds the range of {dtype}")
    return product
