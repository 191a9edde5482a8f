"""Serialize blobs: the tensors of a page or a tail state, with a header and a checksum.

    +-------+--------------------+--------+--------+---------+---------------------+----------+
    | magic | header size,       | header | layout | zeros   | tensors, each       | checksum |
    | 8     | layout size  2 x 8 | JSON   | JSON   | to 64   | padded to 64        | 4 or 32  |
    +-------+--------------------+--------+--------+---------+---------------------+----------+

The layout lists the tensors. Its bytes are equal for all pages of a layer group, so it is parsed
once. Blobs are untrusted: the checksum is compared, and the tensors must fill the payload without
gaps, before a tensor is made. With a secret that all users of a store share, the checksum is an
HMAC of SHA-256, which others cannot forge. Without one, CRC-32 detects corruption. No pickle.
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
MAX_TOKENS = 1 << 20  # of a blob
MAX_CACHED_LAYOUTS = 16
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    )
}


class TensorPlace(NamedTuple):
    """Type, shape and offset of a tensor in a payload."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class BlobLayout:
    """The tensors of a payload, in order and without gaps."""

    tensors: Mapping[str, TensorPlace]

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> BlobLayout:
        tensors, offset = {}, 0
        for name, (dtype, shape) in shapes.items():
            tensors[name] = TensorPlace(dtype, shape, offset)
            offset += _align(tensors[name].nbytes)
        return cls(tensors)

    @cached_property
    def nbytes(self) -> int:
        return sum(_align(place.nbytes) for place in self.tensors.values())

    def view_fields(self, payloads: Tensor) -> Fields:
        """Return views [..., *shape] of the tensors in payloads [..., nbytes]."""
        fields = {}
        for name, place in self.tensors.items():
            shape = (*payloads.shape[:-1], *place.shape)
            if 0 in shape:
                fields[name] = torch.empty(shape, dtype=place.dtype)
            else:
                raw = payloads[..., place.offset : place.offset + place.nbytes]
                fields[name] = raw.view(place.dtype).view(shape)
        return fields

    @cached_property
    def json_bytes(self) -> bytes:
        entries = {
            name: [str(place.dtype).removeprefix("torch."), list(place.shape), place.offset]
            for name, place in self.tensors.items()
        }
        return json.dumps(entries, separators=(",", ":")).encode()


@dataclass(frozen=True, eq=False)
class BlobPayload:
    """Tensors in one contiguous buffer."""

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
    """A page of a layer group, or a tail state, and the tokens that it belongs to."""

    page: str
    part: str
    parent_page: str  # name of the page before its tokens
    tokens: tuple[int, ...]
    payload: BlobPayload
    numbers: Mapping[str, int] = field(default_factory=dict)  # of the tail state's Snapshot
    num_prefilled: int = 0  # leading tokens of the prefix, to this blob's end, that were prefilled
    metadata: Mapping[str, str] = field(default_factory=dict)  # for humans: model, spec


def pack_blob(blob: Blob, secret: bytes | None = None) -> bytearray:
    """Serialize a blob."""
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
    text = json.dumps(header, separators=(",", ":")).encode()
    layout = blob.payload.layout.json_bytes
    begin, nbytes = _align(HEAD.size + len(text) + len(layout)), len(blob.payload.data)
    data = bytearray(begin + nbytes)
    HEAD.pack_into(data, 0, MAGIC, len(text), len(layout))
    data[HEAD.size : HEAD.size + len(text) + len(layout)] = text + layout
    np.frombuffer(data, np.uint8, nbytes, begin)[:] = blob.payload.data.numpy()
    data += _compute_checksum(memoryview(data), secret)
    return data


def parse_blob(data: Bytes, secret: bytes | None = None) -> Blob:
    """Parse and check a blob; its tensors are views of `data`."""
    size = len(data) - len(_compute_checksum(memoryview(b""), secret))
    header_size, layout_size = read_head(data, size)
    body = memoryview(data)[:size]
    if not hmac.compare_digest(_compute_checksum(body, secret), bytes(data[size:])):
        raise BlobError("its checksum does not match: damaged, or written with another secret")
    begin = HEAD.size + header_size
    stop = begin + layout_size
    try:
        header = json.loads(bytes(body[HEAD.size : begin]), object_pairs_hook=reject_duplicate_keys)
        return _make_blob(header, bytes(body[begin:stop]), body[_align(stop) :])
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise BlobError(f"its header cannot be read: {error}") from error


def parse_named_blob(page: str, part: str, data: Bytes, secret: bytes | None = None) -> Blob:
    """Parse the blob that a store has under these names; raise if it has others."""
    blob = parse_blob(data, secret)
    if (blob.page, blob.part) != (page, part):
        raise BlobError(f"it belongs to {blob.page} {blob.part}")
    return blob


def read_metadata(data: Bytes) -> Mapping[str, str]:
    """Return the metadata of a blob without checks; {} if it cannot be read."""
    try:
        size = HEAD.unpack_from(data)[1]
        metadata = json.loads(data[HEAD.size : HEAD.size + min(size, MAX_HEADER)])["about"]
        return {str(name): str(value) for name, value in metadata.items()}
    except (struct.error, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return {}


def _make_blob(header: Any, layout: bytes, payload: memoryview) -> Blob:
    if header["version"] != VERSION:
        raise ValueError(f"version {header['version']!r}, {VERSION} is needed")
    page, part, parent = (_read_text(header, name) for name in ("page", "part", "before"))
    tokens, num_prefilled = header["tokens"], header["prompt"]
    if (
        not isinstance(tokens, list)
        or len(tokens) > MAX_TOKENS
        or not _are_whole_numbers([*tokens, num_prefilled])
    ):
        raise ValueError(f"tokens must be whole numbers, {MAX_TOKENS} at most")
    numbers, metadata = dict(header["numbers"]), dict(header["about"])
    if not _are_whole_numbers(list(numbers.values())):
        raise ValueError("numbers must be whole numbers")
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("about must have texts as values")
    data = _make_payload(_parse_layout(layout), payload)
    return Blob(page, part, parent, tuple(tokens), data, numbers, num_prefilled, metadata)


@lru_cache(MAX_CACHED_LAYOUTS)
def _parse_layout(json_bytes: bytes) -> BlobLayout:
    """Parse a layout; raise unless its tensors are in order without gaps."""
    entries = json.loads(json_bytes, object_pairs_hook=reject_duplicate_keys)
    if not isinstance(entries, dict):
        raise ValueError("the layout is not a JSON object")
    for name, (dtype, shape, _) in entries.items():
        if dtype not in DTYPES or not _are_whole_numbers(shape) or len(shape) > 8:
            raise ValueError(f"field {name}: {dtype} {shape}")
        # A zero side counts as 1: the other sides of an empty tensor must not overflow.
        if prod(side or 1 for side in shape) > MAX_BLOB_BYTES:
            raise ValueError(f"field {name}: {shape}")
    layout = BlobLayout.from_shapes(
        {n: (DTYPES[dtype], tuple(shape)) for n, (dtype, shape, _) in entries.items()}
    )
    for name, place in layout.tensors.items():
        if entries[name][2] != place.offset:
            raise ValueError(f"field {name}: at {entries[name][2]}, expected at {place.offset}")
    return layout


def _make_payload(layout: BlobLayout, data: memoryview) -> BlobPayload:
    """Make a payload of `data`; raise unless the tensors fill it."""
    if layout.nbytes != len(data):
        raise ValueError(f"{len(data)} bytes of data, the layout needs {layout.nbytes}")
    if data.readonly:
        data = memoryview(bytearray(data))
    flat = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0).byte()
    return BlobPayload(layout, flat)


def _read_text(header: Any, name: str) -> str:
    text = header[name]
    if not isinstance(text, str):
        raise ValueError(f"{name} {text!r} is not a text")
    return text


def _are_whole_numbers(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _compute_checksum(data: memoryview, secret: bytes | None) -> bytes:
    if secret is None:
        return zlib.crc32(data).to_bytes(4, "little")
    return hmac.new(secret, data, "sha256").digest()
