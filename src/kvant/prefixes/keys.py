"""Names of pages: a page of tokens is named by everything that led to what is stored of it.

A key is BLAKE2b-256 of the key before it, the ids of 64 tokens, and the digests of media that lie
among them. The first of a chain, its root, is of the model that computed the rows and of how they
are stored. Every part carries its length: so no other list of parts has the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from os import cpu_count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from kvant.hf import make_comparable, named_attributes, named_modules
from kvant.openmp import use_one_thread
from kvant.recipes import CacheSpec, iterate_attention
from kvant.spec.headers import dumps
from kvant.weights import PackedWeight, named_weights

PAGE_TOKENS = 64  # tokens under one key
KEY_VERSION = b"kvant prefix 2"
# Part of the root where a layer selects pages. Selection did not always read the first page of a
# sequence: rows that were stored then differ from those of today under the same spec.
SELECTION_VERSION = b"kvant selection 2"
NUM_PROBED_VALUES = 16  # values of a weight, by which a change is noticed that nothing else tells
MediaDigests = Sequence[tuple[int, bytes]]  # where in a page one begins, and its digest


def digest(*parts: bytes) -> bytes:
    """Of a list of parts."""
    found = blake2b(digest_size=32)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


def make_root_key(model: PreTrainedModel, spec: CacheSpec) -> bytes:
    """The key before the first page: who computes rows, in what, and how they are stored."""
    kind = model.device.type
    told = f"{model.device} {torch.is_autocast_enabled(kind)} {torch.get_autocast_dtype(kind)}"
    parts = [KEY_VERSION, fingerprint(model), told.encode(), dumps(spec).encode()]
    if any(layer.select is not None for layer in iterate_attention(*spec.layers)):
        parts.append(SELECTION_VERSION)
    return digest(*parts)


def salt_key(root: bytes, *salts: str) -> bytes:
    """The same for those alone who know these words."""
    return digest(root, *(word.encode() for word in salts))


def make_page_key(parent: bytes, tokens: Sequence[int], media: MediaDigests = ()) -> bytes:
    """The key of a page behind another one."""
    parts = (part for place, one in media for part in (place.to_bytes(8, "little"), one))
    return digest(parent, np.asarray(tokens, "<i8").tobytes(), *parts)


def make_page_keys(root: bytes, tokens: Sequence[int]) -> list[bytes]:
    """The root, and the key of each whole page of tokens behind it."""
    found = [root]
    for begin in range(0, len(tokens) // PAGE_TOKENS * PAGE_TOKENS, PAGE_TOKENS):
        found.append(make_page_key(found[-1], tokens[begin : begin + PAGE_TOKENS]))
    return found


def explain_no_fingerprint(model: PreTrainedModel) -> str | None:
    """Why nobody can tell what a model computes."""
    modules = named_modules(model)
    for name, module in modules:
        who = name or "the model"
        if module.training and (
            isinstance(module, nn.modules.dropout._DropoutNd)
            or next(module.parameters(), None) is not None
        ):
            return f"{who} is in training mode"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{who} has hooks, which may do anything to its rows"
    weights = (weight for _, module in modules for weight in module._parameters.values())
    if any(weight is not None and weight.is_meta for weight in weights):
        return "some of its weights are not here"
    return None


_TENSOR_DIGESTS: Any = WeakIdKeyDictionary()  # tensor -> its state, and the digest of its bytes


def fingerprint(model: PreTrainedModel) -> bytes:
    """Of all bytes of a model's weights, adapters and buffers, and of its configuration.

    Bytes are hashed anew where a tensor is another one or was written to: by its version, its
    address, and a few of its values. A write past all of these (into `.data`, of few values) is not
    noticed.
    """
    attributes = named_attributes(model)
    loose = [(name, value) for name, value in attributes if isinstance(value, Tensor)]
    values = [(name, make_comparable(value)) for name, value in attributes]
    told = [_filter_config(model.config), [pair for pair in values if pair[1] is not None]]
    parts = [json.dumps(told, default=repr).encode()]
    tensors = [*named_weights(model), *model.named_buffers(), *loose]
    for (name, tensor), found in zip(
        tensors, _hash_tensors([one for _, one in tensors]), strict=True
    ):
        parts += [f"{name} {list(tensor.shape)} {tensor.dtype}".encode(), found]
    return digest(*parts)


def _hash_tensors(tensors: Sequence[Tensor]) -> Iterable[bytes]:
    """Of the bytes of each, which are hashed where that was not done before."""
    states = [_describe_tensor_state(tensor) for tensor in tensors]
    known = [_TENSOR_DIGESTS.get(tensor, (None, b"")) for tensor in tensors]
    new = [at for at, state in enumerate(states) if known[at][0] != state]
    if new:  # hashing lets other threads run
        with ThreadPoolExecutor(cpu_count(), initializer=use_one_thread) as threads:
            hashed = threads.map(_hash_tensor, [tensors[at] for at in new])
            for at, found in zip(new, hashed, strict=True):
                _TENSOR_DIGESTS[tensors[at]] = known[at] = states[at], found
    return [found for _, found in known]


def _describe_tensor_state(tensor: Tensor) -> object:
    """Other once it has other values; equal to nothing where nobody can tell."""
    if isinstance(tensor, PackedWeight):  # whoever writes to it packs it anew
        return id(tensor.matrix)
    if tensor.is_inference():
        return object()
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    some = flat[:: max(1, len(flat) // NUM_PROBED_VALUES)][:NUM_PROBED_VALUES].tolist()
    return tensor.data_ptr(), tensor._version, str(some)


@torch.no_grad()
def _hash_tensor(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return blake2b(flat.numpy().data, digest_size=32).digest()


IGNORED_CONFIG_KEYS = (
    "attn_implementation",
    "transformers_version",
    "name_or_path",
    "architectures",
)


def _filter_config(config: Any) -> Any:
    """A configuration in JSON, without what says nothing of the rows."""
    return _to_json_value(config.to_dict())


def _to_json_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        names = sorted(name for name in map(str, value) if not _is_ignored(name))
        return {name: _to_json_value(value[name]) for name in names if name in value}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_to_json_value(one) for one in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def _is_ignored(name: str) -> bool:
    return any(word in name for word in IGNORED_CONFIG_KEYS)
