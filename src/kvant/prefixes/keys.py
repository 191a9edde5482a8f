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
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvant.hf import plain_values
from kvant.recipes import CacheSpec
from kvant.spec.headers import dumps
from kvant.weights import PackedWeight

PAGE = 64  # tokens under one key
EDITION = b"kvant prefix 1"
Media = Sequence[tuple[int, bytes]]  # where in a page one begins, and its digest


def digest(*parts: bytes) -> bytes:
    """Of a list of parts."""
    found = blake2b(digest_size=32)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


def root(model: PreTrainedModel, spec: CacheSpec, salt: str = "") -> bytes:
    """The key before the first page: who computes rows, how they are stored, and for whom."""
    return digest(EDITION, fingerprint(model), dumps(spec).encode(), salt.encode())


def key(before: bytes, tokens: Sequence[int], media: Media = ()) -> bytes:
    """The key of a page behind another one."""
    parts = (part for place, one in media for part in (place.to_bytes(8, "little"), one))
    return digest(before, np.asarray(tokens, "<i8").tobytes(), *parts)


_KNOWN: WeakKeyDictionary[PreTrainedModel, tuple[object, bytes]] = WeakKeyDictionary()


def fingerprint(model: PreTrainedModel) -> bytes:
    """Of all bytes of a model's weights, adapters and buffers, and of its configuration.

    It is computed anew where a tensor is another one or was written to.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    values = [pair for pair in plain_values(model) if pair[1] is not None]
    plain = json.dumps([_settings(model.config), values], default=repr).encode()
    now = (plain, [_state(tensor) for _, tensor in tensors])
    known = _KNOWN.get(model)
    if known is not None and known[0] == now and None not in now[1]:
        return known[1]
    with ThreadPoolExecutor(cpu_count()) as threads:  # hashing lets other threads run
        parts = list(threads.map(_of_tensor, *zip(*tensors, strict=True))) if tensors else []
    found = digest(plain, *parts)
    _KNOWN[model] = now, found
    return found


def _state(tensor: Tensor) -> tuple[int, int, int] | None:
    """Other once it is another tensor or has other values; None where nobody can tell."""
    if isinstance(tensor, PackedWeight):  # whoever writes to it packs it anew
        return id(tensor), id(tensor.packed), 0
    if tensor.is_inference():
        return None
    return id(tensor), tensor.data_ptr(), tensor._version


@torch.no_grad()
def _of_tensor(name: str, tensor: Tensor) -> bytes:
    what = f"{name} {list(tensor.shape)} {tensor.dtype}".encode()
    if tensor.is_meta:
        return digest(what, b"meta")
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return digest(what, blake2b(flat.numpy().data, digest_size=32).digest())


LEFT_OUT = ("attn_implementation", "transformers_version", "name_or_path", "architectures")


def _settings(config: Any) -> Any:
    """A configuration in JSON, without what says nothing of the rows."""
    return _told(config.to_dict())


def _told(value: Any) -> Any:
    if isinstance(value, Mapping):
        names = sorted(name for name in map(str, value) if not _left_out(name))
        return {name: _told(value[name]) for name in names if name in value}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_told(one) for one in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def _left_out(name: str) -> bool:
    return any(word in name for word in LEFT_OUT)
