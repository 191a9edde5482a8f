"""Compute page keys: hashes of everything that the stored KV rows of a page depend on.

    root key = hash(version, fingerprint of the model, device and autocast, spec)
    with an adapter, its root key = hash(version, root key, hash of the adapter)
    tree key = hash(root key, salts); the first page uses it as the key of its previous page
    page key = hash(key of the previous page, 64 token ids)

The hash is BLAKE2b-256. Every part is preceded by its length, so different lists of parts never
give the same bytes.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from os import cpu_count
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from kvant.hf import (
    TransformersCache,
    has_hooks,
    make_comparable,
    named_attributes,
    named_modules,
    supports_chunked_prefill,
)
from kvant.platform.c_libraries import use_one_thread
from kvant.recipes import CacheSpec, iterate_attention
from kvant.spec import describe_spec
from kvant.spec.headers import dumps
from kvant.spec.packages import identify_extensions, list_extensions
from kvant.weights.packed_weight import PackedWeight
from kvant.weights.packing import is_packed, named_weights

PAGE_TOKENS = 64  # tokens that one page key covers
KEY_VERSION = b"kvant prefix 2"
# Part of the root key if a layer reads only selected pages. The first version of page selection did
# not always read the first page, so the rows that it stored differ under the same spec.
SELECTION_VERSION = b"kvant selection 2"
# Part of the root key if the spec names extensions: other packages or versions, or changed code,
# may store other rows under one name.
EXTENSION_VERSION = b"kvant extension 1"
ADAPTER_VERSION = b"kvant adapter 1"
NUM_PROBED_VALUES = 16  # values of a weight that are compared to notice a write


class NamespaceKeys(NamedTuple):
    """Keys of a model, a spec and salts."""

    tree_key: bytes = b""  # the root key with adapter and salts
    pools_key: bytes = b""  # the root key without them: all salts and adapters share pools
    metadata: Mapping[str, str] = {}  # for humans: model, spec


class ModelKeys:
    """Make the keys of one model, spec and salts; remake them when a weights check is due."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: TransformersCache,
        salts: tuple[str, ...],
        check_interval: float,
        *,
        exact: bool,
    ) -> None:
        """The weights are checked again after `check_interval` seconds.

        With `exact`, the keys also hash the settings that change only the rounding of rows.
        """
        self.spec = cache.spec
        self.no_prefixes_reason: str | None = None  # why prefixes are not cached for this model
        if any(layer.is_opaque for layer in cache.layer_info):
            self.no_prefixes_reason = "transformers manages some of its layers"
        elif not supports_chunked_prefill(model):
            self.no_prefixes_reason = "it does not support chunked prefill"
        self._is_unsupported = self.no_prefixes_reason is not None
        self.model = ref(model)  # weak: a call returns None once the model is freed
        self._backend = str(cache.backend)
        self._salts = salts
        self._adapter_key = ""  # of no adapter
        self._exact = exact
        self._check_interval = check_interval
        self._checked: tuple[float, NamespaceKeys | None] = (-math.inf, None)

    def fork(self, salt: str | None = None, adapter_key: str | None = None) -> ModelKeys:
        """Return a copy with another salt or adapter; None keeps the present one.

        The first salt, that of `Prefixes`, stays. `salt` replaces the second; "" removes it.
        """
        fork = copy.copy(self)
        if salt is not None:
            fork._salts = self._salts[:1] + ((salt,) if salt else ())
            fork.invalidate()
        if adapter_key is not None:
            fork._adapter_key = adapter_key
            fork.invalidate()
        return fork

    def invalidate(self) -> None:
        """Check the weights again at the next use: the model may have been changed."""
        self._checked = (-math.inf, None)

    def refresh(self) -> NamespaceKeys | None:
        """Return the keys, made again if the weights check is due; None if no key is possible."""
        checked_at, keys = self._checked
        if time.monotonic() - checked_at >= self._check_interval:
            checked_at, keys = time.monotonic(), self._make()
            self._checked = checked_at, keys
        return keys

    def _make(self) -> NamespaceKeys | None:
        model = self.model()
        if self._is_unsupported or model is None:
            return None
        self.no_prefixes_reason = explain_missing_key(model)
        if self.no_prefixes_reason is not None:
            return None
        root_key = make_root_key(model, self.spec)
        rounding = ""
        if self._exact:
            rounding = f"{self._backend} {model.config._attn_implementation} {is_packed(model)}"
        adapter_root = root_key
        if self._adapter_key:
            adapter_root = digest(ADAPTER_VERSION, root_key, self._adapter_key.encode())
        tree_key = salt_key(adapter_root, self._salts[0], rounding, *self._salts[1:])
        metadata = {"model": type(model).__name__, "spec": describe_spec(self.spec)}
        if extensions := list_extensions(self.spec):
            metadata["extensions"] = ", ".join(map(str, extensions))
        if self._adapter_key:
            metadata["adapter"] = self._adapter_key[:16]
        return NamespaceKeys(tree_key, root_key, metadata)


def digest(*parts: bytes) -> bytes:
    """Hash a list of parts, each preceded by its length."""
    hasher = blake2b(digest_size=32)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def make_root_key(model: PreTrainedModel, spec: CacheSpec) -> bytes:
    """Return a hash of the model, its device and autocast, and the spec; salts are added later."""
    device = model.device.type
    autocast = f"{torch.is_autocast_enabled(device)} {torch.get_autocast_dtype(device)}"
    precision = f"{model.device} {autocast}"
    parts = [KEY_VERSION, fingerprint(model), precision.encode(), dumps(spec).encode()]
    if any(layer.select is not None for layer in iterate_attention(*spec.layers)):
        parts.append(SELECTION_VERSION)
    if extensions := identify_extensions(spec):
        parts += [EXTENSION_VERSION, *(text.encode() for text in extensions)]
    return digest(*parts)


def salt_key(root: bytes, *salts: str) -> bytes:
    """Return the tree key of a root key; only readers with the same salts share it."""
    return digest(root, *(salt.encode() for salt in salts))


def make_page_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of the page that follows the page with key `parent`."""
    return digest(parent, np.asarray(tokens, "<i8").tobytes())


def explain_missing_key(model: PreTrainedModel) -> str | None:
    """Return why a key cannot identify a model's rows; None if it can."""
    modules = named_modules(model)
    for name, module in modules:
        label = name or "the model"
        if module.training and (
            isinstance(module, nn.modules.dropout._DropoutNd)
            or next(module.parameters(), None) is not None
        ):
            return f"{label} is in training mode"
        if has_hooks(module):
            return f"{label} has hooks, which may change its rows"
    weights = (weight for _, module in modules for weight in module._parameters.values())
    if any(weight is not None and weight.is_meta for weight in weights):
        return "some of its weights are not loaded"
    return None


_TENSOR_DIGESTS: Any = WeakIdKeyDictionary()  # tensor -> (state, digest of its bytes)


def fingerprint(model: PreTrainedModel) -> bytes:
    """Hash a model's weights, adapters, buffers and configuration.

    A tensor is hashed again when its version, its address, or one of a few probed values changes.
    A write through `.data` that misses the probed values changes none of these. It is not noticed.
    """
    attributes = named_attributes(model)
    attribute_tensors = [(name, value) for name, value in attributes if isinstance(value, Tensor)]
    values = [(name, make_comparable(value)) for name, value in attributes]
    settings = [_to_json_value(model.config.to_dict()), [v for v in values if v[1] is not None]]
    parts = [json.dumps(settings, default=repr).encode()]
    tensors = [*named_weights(model), *model.named_buffers(), *attribute_tensors]
    digests = _hash_tensors([tensor for _, tensor in tensors])
    for (name, tensor), tensor_digest in zip(tensors, digests, strict=True):
        parts += [f"{name} {list(tensor.shape)} {tensor.dtype}".encode(), tensor_digest]
    return digest(*parts)


def _hash_tensors(tensors: Sequence[Tensor]) -> Iterable[bytes]:
    """Return the digests of tensors; hash only those that changed."""
    states = [_describe_tensor_state(tensor) for tensor in tensors]
    entries = [_TENSOR_DIGESTS.get(tensor, (None, b"")) for tensor in tensors]
    changed = [index for index, state in enumerate(states) if entries[index][0] != state]
    if changed:  # hashing releases the GIL
        with ThreadPoolExecutor(cpu_count(), initializer=use_one_thread) as threads:
            digests = threads.map(_hash_tensor, [tensors[index] for index in changed])
            for index, tensor_digest in zip(changed, digests, strict=True):
                _TENSOR_DIGESTS[tensors[index]] = entries[index] = states[index], tensor_digest
    return [tensor_digest for _, tensor_digest in entries]


def _describe_tensor_state(tensor: Tensor) -> object:
    """Return a value that changes when the tensor is written.

    Inference tensors have no version: they get a value that equals no other, so they are always
    hashed.
    """
    if isinstance(tensor, PackedWeight):  # stored as codes, which are never written to
        return id(tensor.matrix)
    if tensor.is_inference():
        return object()
    flat = tensor.detach().reshape(-1)
    probed = flat[:: max(1, len(flat) // NUM_PROBED_VALUES)][:NUM_PROBED_VALUES].tolist()
    return tensor.data_ptr(), tensor._version, str(probed)


@torch.no_grad()
def _hash_tensor(tensor: Tensor) -> bytes:
    if isinstance(tensor, PackedWeight):
        return digest(tensor.matrix.format.encode(), *map(_hash_tensor, tensor.matrix.tensors))
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return blake2b(flat.numpy().data, digest_size=32).digest()


# A setting does not affect the rows if its name contains one of these.
IGNORED_KEYS = "attn_implementation", "transformers_version", "name_or_path", "architectures"


def _to_json_value(value: Any) -> Any:
    """Return a configuration as a JSON value, without settings that do not affect the rows."""
    if isinstance(value, Mapping):
        names = sorted(map(str, value))
        used = (name for name in names if not any(part in name for part in IGNORED_KEYS))
        return {name: _to_json_value(value[name]) for name in used if name in value}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_to_json_value(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)
