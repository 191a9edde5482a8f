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
from kvant.spec.headers import distinct
from kvant.stores.contract import HEAD, MAGIC, MAX_BLOB, MAX_HEADER, Bytes, read_head

VERSION = 2
ALIGNED = 64
MAX_TOKENS = 1 << 20  # that one blob tells
LAYOUTS = 16  # that are remembered
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    )
}


class Place(NamedTuple):
    """One tensor of a payload."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Which tensors lie in a payload, one behind the other, and where each begins."""

    places: Mapping[str, Place]

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> Layout:
        places, at = {}, 0
        for name, (dtype, shape) in shapes.items():
            places[name] = Place(dtype, shape, at)
            at += _aligned(places[name].nbytes)
        return cls(places)

    @cached_property
    def nbytes(self) -> int:
        return sum(_aligned(place.nbytes) for place in self.places.values())

    def fields(self, payloads: Tensor) -> Fields:
        """The tensors [..., *shape] within payloads [..., nbytes]."""
        found = {}
        for name, place in self.places.items():
            shape = (*payloads.shape[:-1], *place.shape)
            if 0 in shape:
                found[name] = torch.empty(shape, dtype=place.dtype)
            else:
                raw = payloads[..., place.at : place.at + place.nbytes]
                found[name] = raw.view(place.dtype).view(shape)
        return found

    @cached_property
    def text(self) -> bytes:
        told = {
            name: [str(place.dtype).removeprefix("torch."), list(place.shape), place.at]
            for name, place in self.places.items()
        }
        return json.dumps(told, separators=(",", ":")).encode()


@dataclass(frozen=True, eq=False)
class Payload:
    """Tensors in one piece of memory."""

    layout: Layout
    data: Tensor  # bytes

    @classmethod
    def of(cls, fields: Fields) -> Payload:
        layout = Layout.of({name: (x.dtype, tuple(x.shape)) for name, x in fields.items()})
        data = torch.zeros(layout.nbytes, dtype=torch.uint8)
        for name, tensor in layout.fields(data).items():
            tensor.copy_(fields[name])
        return cls(layout, data)

    @property
    def fields(self) -> Fields:
        return self.layout.fields(self.data)


@dataclass(frozen=True)
class Blob:
    """What stands in one, and what it is of."""

    page: str
    part: str
    before: str  # the page before it
    tokens: tuple[int, ...]  # that it is of, behind that page
    payload: Payload
    numbers: Mapping[str, int] = field(default_factory=dict)
    prompt: int = 0  # of all tokens up to its end, so many were read as prompts
    about: Mapping[str, str] = field(default_factory=dict)  # for people: model, spec


def packed(blob: Blob, secret: bytes | None = None) -> bytearray:
    """The bytes of a blob."""
    header = {
        "version": VERSION,
        "page": blob.page,
        "part": blob.part,
        "before": blob.before,
        "tokens": list(blob.tokens),
        "prompt": blob.prompt,
        "numbers": dict(blob.numbers),
        "about": dict(blob.about),
    }
    text, layout = json.dumps(header, separators=(",", ":")).encode(), blob.payload.layout.text
    begin, nbytes = _aligned(HEAD.size + len(text) + len(layout)), len(blob.payload.data)
    data = bytearray(begin + nbytes)
    HEAD.pack_into(data, 0, MAGIC, len(text), len(layout))
    data[HEAD.size : HEAD.size + len(text) + len(layout)] = text + layout
    np.frombuffer(data, np.uint8, nbytes, begin)[:] = blob.payload.data.numpy()
    data += _checksum(memoryview(data), secret)
    return data


def opened(data: Bytes, secret: bytes | None = None) -> Blob:
    """What bytes say, if they are a blob; its tensors lie in them."""
    size = len(data) - len(_checksum(memoryview(b""), secret))
    length, more = read_head(data, size)
    body = memoryview(data)[:size]
    if not hmac.compare_digest(_checksum(body, secret), bytes(data[size:])):
        raise BlobError("damaged, or written with another secret: its checksum does not match")
    begin, stop = HEAD.size + length, HEAD.size + length + more
    try:
        header = json.loads(bytes(body[HEAD.size : begin]), object_pairs_hook=distinct)
        return _blob(header, bytes(body[begin:stop]), body[_aligned(stop) :])
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise BlobError(f"its header cannot be read: {error}") from error


def opened_as(page: str, part: str, data: Bytes, secret: bytes | None = None) -> Blob:
    """What bytes say that were kept under these names."""
    blob = opened(data, secret)
    if (blob.page, blob.part) != (page, part):
        raise BlobError(f"it is of {blob.page} {blob.part}")
    return blob


def about(data: Bytes) -> Mapping[str, str]:
    """What a blob says for people, unchecked; nothing where it cannot be read."""
    try:
        length = HEAD.unpack_from(data)[1]
        told = json.loads(data[HEAD.size : HEAD.size + min(length, MAX_HEADER)])["about"]
        return {str(name): str(value) for name, value in told.items()}
    except (struct.error, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return {}


def _blob(header: Any, layout: bytes, payload: memoryview) -> Blob:
    if header["version"] != VERSION:
        raise ValueError(f"version {header['version']!r}, {VERSION} is needed")
    page, part, before = (_word(header, name) for name in ("page", "part", "before"))
    tokens, prompt = header["tokens"], header["prompt"]
    if not isinstance(tokens, list) or len(tokens) > MAX_TOKENS or not _whole([*tokens, prompt]):
        raise ValueError("tokens that are no whole numbers, or too many")
    numbers, about = dict(header["numbers"]), dict(header["about"])
    if not _whole(list(numbers.values())) or not all(isinstance(x, str) for x in about.values()):
        raise ValueError("numbers that are no whole numbers")
    held = _payload(_layout(layout), payload)
    return Blob(page, part, before, tuple(tokens), held, numbers, prompt, about)


@lru_cache(LAYOUTS)
def _layout(text: bytes) -> Layout:
    """Tensors that lie one behind the other."""
    told = json.loads(text, object_pairs_hook=distinct)
    if not isinstance(told, dict):
        raise ValueError("a layout that is no object")
    for name, (dtype, shape, _) in told.items():
        if dtype not in DTYPES or not _whole(shape) or len(shape) > 8:
            raise ValueError(f"field {name}: {dtype} {shape}")
        if prod(side or 1 for side in shape) > MAX_BLOB:  # empty, and beyond all counting
            raise ValueError(f"field {name}: {shape}")
    layout = Layout.of({n: (DTYPES[dtype], tuple(shape)) for n, (dtype, shape, _) in told.items()})
    for name, place in layout.places.items():
        if told[name][2] != place.at:
            raise ValueError(f"field {name}: at {told[name][2]}, it is due at {place.at}")
    return layout


def _payload(layout: Layout, data: memoryview) -> Payload:
    """The tensors, if they fill it."""
    if layout.nbytes != len(data):
        raise ValueError(f"{len(data)} bytes, its fields are {layout.nbytes}")
    if data.readonly:
        data = memoryview(bytearray(data))
    flat = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0).byte()
    return Payload(layout, flat)


def _word(header: Any, name: str) -> str:
    word = header[name]
    if not isinstance(word, str):
        raise ValueError(f"{name} {word!r} is no word")
    return word


def _whole(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _checksum(data: memoryview, secret: bytes | None) -> bytes:
    if secret is None:
        return zlib.crc32(data).to_bytes(4, "little")
    return hmac.new(secret, data, "sha256").digest()
