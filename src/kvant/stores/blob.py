"""A blob: a page of one kind of layers, or what one needs besides pages, as bytes that are checked.

    magic | length of the header | header, JSON | zeros up to 64 | tensors, each at 64 | checksum

Anybody may have written them. So a blob is believed only if its checksum is right, and its tensors
lie one behind the other and fill it, before any of them is made. With a secret, which all who share
a store have, the checksum is an HMAC of SHA-256 that nobody else can make; without, CRC-32 finds
what was damaged. No pickle.
"""

from __future__ import annotations

import hmac
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvant.contracts import Fields
from kvant.errors import BlobError
from kvant.spec import distinct
from kvant.stores.contract import MAX_BLOB, Bytes

MAGIC = b"kvantpg1"
VERSION = 1
ALIGNED = 64
HEAD = struct.Struct("<8sQ")
MAX_HEADER = 1 << 24
MAX_TOKENS = 1 << 20  # that one blob tells
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    )
}


@dataclass(frozen=True)
class Blob:
    """What stands in one, and what it is of."""

    page: str
    part: str
    before: str  # the page before it
    tokens: tuple[int, ...]  # that it is of, behind that page
    fields: Fields
    numbers: Mapping[str, int] = field(default_factory=dict)
    prompt: int = 0  # of all tokens up to its end, so many were read as prompts
    about: Mapping[str, str] = field(default_factory=dict)  # for people: model, spec


def packed(blob: Blob, secret: bytes | None = None) -> bytearray:
    """The bytes of a blob."""
    fields: dict[str, Any] = {}
    place = 0
    tensors = {name: tensor.contiguous() for name, tensor in blob.fields.items()}
    for name, tensor in tensors.items():
        fields[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), place]
        place += _aligned(tensor.nbytes)
    header = {
        "version": VERSION,
        "page": blob.page,
        "part": blob.part,
        "before": blob.before,
        "tokens": list(blob.tokens),
        "prompt": blob.prompt,
        "numbers": dict(blob.numbers),
        "about": dict(blob.about),
        "fields": fields,
    }
    raw = json.dumps(header, separators=(",", ":")).encode()
    begin = _aligned(HEAD.size + len(raw))
    data = bytearray(begin + place)
    HEAD.pack_into(data, 0, MAGIC, len(raw))
    data[HEAD.size : HEAD.size + len(raw)] = raw
    for (_, _, at), tensor in zip(fields.values(), tensors.values(), strict=True):
        flat = tensor.cpu().reshape(-1).view(torch.uint8)
        np.frombuffer(data, np.uint8, tensor.nbytes, begin + at)[:] = flat.numpy()
    data += _checksum(memoryview(data), secret)
    return data


def opened(data: Bytes, secret: bytes | None = None) -> Blob:
    """What bytes say, if they are a blob; its tensors lie in them."""
    size = len(data) - len(_checksum(memoryview(b""), secret))
    if size < HEAD.size or data[: len(MAGIC)] != MAGIC:
        raise BlobError("not a page of kvant, or cut short")
    body = memoryview(data)[:size]
    if not hmac.compare_digest(_checksum(body, secret), bytes(data[size:])):
        raise BlobError("damaged, or written with another secret: its checksum does not match")
    length = HEAD.unpack_from(data)[1]
    if length > min(MAX_HEADER, size - HEAD.size):
        raise BlobError(f"a header of {length} bytes in {size}")
    try:
        header = json.loads(bytes(body[HEAD.size : HEAD.size + length]), object_pairs_hook=distinct)
        return _blob(header, body[_aligned(HEAD.size + length) :])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
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


def _blob(header: Any, payload: memoryview) -> Blob:
    if header["version"] != VERSION:
        raise ValueError(f"version {header['version']!r}, {VERSION} is needed")
    words = {name: _word(header, name) for name in ("page", "part", "before")}
    tokens, prompt = header["tokens"], header["prompt"]
    if not isinstance(tokens, list) or len(tokens) > MAX_TOKENS or not _whole([*tokens, prompt]):
        raise ValueError("tokens that are no whole numbers, or too many")
    numbers, about = dict(header["numbers"]), dict(header["about"])
    if not _whole(list(numbers.values())) or not all(isinstance(x, str) for x in about.values()):
        raise ValueError("numbers that are no whole numbers")
    fields = _fields(header["fields"], payload)
    return Blob(
        words["page"], words["part"], words["before"], tuple(tokens), fields, numbers, prompt, about
    )


def _fields(told: Mapping[str, Sequence[Any]], payload: memoryview) -> dict[str, Tensor]:
    """The tensors, which lie one behind the other and fill the payload."""
    place, found = 0, {}
    for name, (dtype, shape, at) in dict(told).items():
        if dtype not in DTYPES or not _whole(shape) or len(shape) > 8 or at != place:
            raise ValueError(f"field {name}: {dtype} {shape} at {at}")
        if prod(side or 1 for side in shape) > MAX_BLOB:  # empty, and beyond all counting
            raise ValueError(f"field {name}: {shape}")
        nbytes = prod(shape) * DTYPES[dtype].itemsize
        place += _aligned(nbytes)
        if place > len(payload):
            raise ValueError(f"field {name}: {nbytes} bytes at {at} of {len(payload)}")
        found[name] = (DTYPES[dtype], shape, at, nbytes)
    if place != len(payload):
        raise ValueError(f"{len(payload)} bytes, its fields are {place}")
    if payload.readonly:
        payload = memoryview(bytearray(payload))
    flat = torch.frombuffer(payload, dtype=torch.uint8) if place else torch.empty(0)
    return {
        name: flat[at : at + nbytes].view(dtype).view(shape)
        if nbytes
        else torch.empty(tuple(shape), dtype=dtype)
        for name, (dtype, shape, at, nbytes) in found.items()
    }


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
