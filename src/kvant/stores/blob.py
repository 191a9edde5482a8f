"""A blob: a page of one kind of layers, or what one needs besides pages, as bytes that are checked.

    magic | lengths of header and layout | header, JSON | layout, JSON | zeros up to 64
    | tensors, each at 64 | checksum

The layout says which tensors there are: it is the same bytes for all pages of a kind, and is read
once. Anybody may have written a blob. So it is believed only if its checksum is right, and its
tensors lie one behind the other and fill it, before any of them is made. With a secret, which all
who share a store have, the checksum is an HMAC of SHA-256 that nobody else can make; without,
CRC-32 finds what was damaged. No pickle.
"""

from __future__ import annotations

import hmac
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvant.contracts import Fields
from kvant.errors import BlobError
from kvant.spec.headers import reject_duplicate_keys
from kvant.stores.contract import HEAD, MAGIC, MAX_BLOB_BYTES, MAX_HEADER, Bytes, read_head

VERSION = 2
ALIGNMENT = 64
MAX_TOKENS = 1 << 20  # that one blob tells
MAX_CACHED_LAYOUTS = 16  # that are remembered
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    )
}


class TensorPlace(NamedTuple):
    """One tensor of a payload."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class BlobLayout:
    """Which tensors lie in a payload, one behind the other, and where each begins."""

    tensors: Mapping[str, TensorPlace]

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> BlobLayout:
        places, at = {}, 0
        for name, (dtype, shape) in shapes.items():
            places[name] = TensorPlace(dtype, shape, at)
            at += _align(places[name].nbytes)
        return cls(places)

    @cached_property
    def nbytes(self) -> int:
        return sum(_align(place.nbytes) for place in self.tensors.values())

    def view_fields(self, payloads: Tensor) -> Fields:
        """The tensors [..., *shape] within payloads [..., nbytes]."""
        found = {}
        for name, place in self.tensors.items():
            shape = (*payloads.shape[:-1], *place.shape)
            if 0 in shape:
                found[name] = torch.empty(shape, dtype=place.dtype)
            else:
                raw = payloads[..., place.offset : place.offset + place.nbytes]
                found[name] = raw.view(place.dtype).view(shape)
        return found

    @cached_property
    def json_bytes(self) -> bytes:
        told = {
            name: [str(place.dtype).removeprefix("torch."), list(place.shape), place.offset]
            for name, place in self.tensors.items()
        }
        return json.dumps(told, separators=(",", ":")).encode()


@dataclass(frozen=True, eq=False)
class BlobPayload:
    """Tensors in one piece of memory."""

    layout: BlobLayout
    data: Tensor  # bytes

    @classmethod
    def from_fields(cls, fields: Fields) -> BlobPayload:
        layout = BlobLayout.from_shapes(
            {name: (x.dtype, tuple(x.shape)) for name, x in fields.items()}
        )
        data = torch.zeros(layout.nbytes, dtype=torch.uint8)
        for name, tensor in layout.view_fields(data).items():
            tensor.copy_(fields[name])
        return cls(layout, data)

    @property
    def fields(self) -> Fields:
        return self.layout.view_fields(self.data)


@dataclass(frozen=True)
class Blob:
    """What stands in one, and what it is of."""

    page: str
    part: str
    parent_page: str  # the page before it
    tokens: tuple[int, ...]  # that it is of, behind that page
    payload: BlobPayload
    numbers: Mapping[str, int] = field(default_factory=dict)
    num_prefilled: int = 0  # of all tokens up to its end, so many were read as prompts
    metadata: Mapping[str, str] = field(default_factory=dict)  # for people: model, spec


def pack_blob(blob: Blob, secret: bytes | None = None) -> bytearray:
    """The bytes of a blob."""
    header = {
        "version": VERSION,
        "page": blob.page,
        "part": blob.part,
        "before": blob.parent_page,
        "tokens": list(blob.tokens),
        "prompt": blob.num_prefilled,
        "numbers": dict(blob.numbers),
        "about": dict(blob.metadata),
    }
    text, layout = (
        json.dumps(header, separators=(",", ":")).encode(),
        blob.payload.layout.json_bytes,
    )
    begin, nbytes = _align(HEAD.size + len(text) + len(layout)), len(blob.payload.data)
    data = bytearray(begin + nbytes)
    HEAD.pack_into(data, 0, MAGIC, len(text), len(layout))
    data[HEAD.size : HEAD.size + len(text) + len(layout)] = text + layout
    np.frombuffer(data, np.uint8, nbytes, begin)[:] = blob.payload.data.numpy()
    data += _compute_checksum(memoryview(data), secret)
    return data


def parse_blob(data: Bytes, secret: bytes | None = None) -> Blob:
    """What bytes say, if they are a blob; its tensors lie in them."""
    size = len(data) - len(_compute_checksum(memoryview(b""), secret))
    length, more = read_head(data, size)
    body = memoryview(data)[:size]
    if not hmac.compare_digest(_compute_checksum(body, secret), bytes(data[size:])):
        raise BlobError("damaged, or written with another secret: its checksum does not match")
    begin, stop = HEAD.size + length, HEAD.size + length + more
    try:
        header = json.loads(bytes(body[HEAD.size : begin]), object_pairs_hook=reject_duplicate_keys)
        return _make_blob(header, bytes(body[begin:stop]), body[_align(stop) :])
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise BlobError(f"its header cannot be read: {error}") from error


def parse_named_blob(page: str, part: str, data: Bytes, secret: bytes | None = None) -> Blob:
    """What bytes say that were kept under these names."""
    blob = parse_blob(data, secret)
    if (blob.page, blob.part) != (page, part):
        raise BlobError(f"it is of {blob.page} {blob.part}")
    return blob


def read_metadata(data: Bytes) -> Mapping[str, str]:
    """What a blob says for people, unchecked; nothing where it cannot be read."""
    try:
        length = HEAD.unpack_from(data)[1]
        told = json.loads(data[HEAD.size : HEAD.size + min(length, MAX_HEADER)])["about"]
        return {str(name): str(value) for name, value in told.items()}
    except (struct.error, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return {}


def _make_blob(header: Any, layout: bytes, payload: memoryview) -> Blob:
    if header["version"] != VERSION:
        raise ValueError(f"version {header['version']!r}, {VERSION} is needed")
    page, part, before = (_read_text(header, name) for name in ("page", "part", "before"))
    tokens, prompt = header["tokens"], header["prompt"]
    if (
        not isinstance(tokens, list)
        or len(tokens) > MAX_TOKENS
        or not _are_whole_numbers([*tokens, prompt])
    ):
        raise ValueError("tokens that are no whole numbers, or too many")
    numbers, about = dict(header["numbers"]), dict(header["about"])
    if not _are_whole_numbers(list(numbers.values())) or not all(
        isinstance(x, str) for x in about.values()
    ):
        raise ValueError("numbers that are no whole numbers")
    held = _make_payload(_parse_layout(layout), payload)
    return Blob(page, part, before, tuple(tokens), held, numbers, prompt, about)


@lru_cache(MAX_CACHED_LAYOUTS)
def _parse_layout(json_bytes: bytes) -> BlobLayout:
    """Tensors that lie one behind the other."""
    told = json.loads(json_bytes, object_pairs_hook=reject_duplicate_keys)
    if not isinstance(told, dict):
        raise ValueError("a layout that is no object")
    for name, (dtype, shape, _) in told.items():
        if dtype not in DTYPES or not _are_whole_numbers(shape) or len(shape) > 8:
            raise ValueError(f"field {name}: {dtype} {shape}")
        if prod(side or 1 for side in shape) > MAX_BLOB_BYTES:  # empty, and beyond all counting
            raise ValueError(f"field {name}: {shape}")
    layout = BlobLayout.from_shapes(
        {n: (DTYPES[dtype], tuple(shape)) for n, (dtype, shape, _) in told.items()}
    )
    for name, place in layout.tensors.items():
        if told[name][2] != place.offset:
            raise ValueError(f"field {name}: at {told[name][2]}, it is due at {place.offset}")
    return layout


def _make_payload(layout: BlobLayout, data: memoryview) -> BlobPayload:
    """The tensors, if they fill it."""
    if layout.nbytes != len(data):
        raise ValueError(f"{len(data)} bytes, its fields are {layout.nbytes}")
    if data.readonly:
        data = memoryview(bytearray(data))
    flat = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0).byte()
    return BlobPayload(layout, flat)


def _read_text(header: Any, name: str) -> str:
    word = header[name]
    if not isinstance(word, str):
        raise ValueError(f"{name} {word!r} is no word")
    return word


def _are_whole_numbers(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _compute_checksum(data: memoryview, secret: bytes | None) -> bytes:
    if secret is None:
        return zlib.crc32(data).to_bytes(4, "little")
    return hmac.new(secret, data, "sha256").digest()
