"""Test that bytes of a store are those written, or are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvant.errors import BlobError
from kvant.stores import Blob, BlobPayload, pack_blob, parse_blob, parse_named_blob, read_metadata
from kvant.stores.blob import HEAD, MAGIC, _align, _compute_checksum

SECRETS = (None, b"known to all who share the store", b"k" * 100)


def make_blob() -> Blob:
    rows = torch.arange(24, dtype=torch.float32).view(4, 2, 3)
    fields = {
        "0/keys.open": rows.to(torch.bfloat16),
        "0/keys.codes": torch.arange(7, dtype=torch.uint8),
        "0/values.open": rows[:0],
        "0/numbers": torch.tensor([[-3, 3, 0, 0, 0, 0]]),
        "0/scale": torch.tensor(0.5),
    }
    metadata = {"model": "llama", "spec": "raw"}
    payload = BlobPayload.from_fields(fields)
    return Blob(
        "ab/" + "0" * 64, "k0-1", "ab/" + "1" * 64, (1, 2, 3), payload, {"n": 5}, 3, metadata
    )


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("buffer_type", [bytes, bytearray])
def test_round_trip(secret: bytes | None, buffer_type: Callable[[Any], Any]) -> None:
    blob = make_blob()
    parsed = parse_blob(buffer_type(pack_blob(blob, secret)), secret)
    fields = parsed.payload.fields
    assert fields.keys() == blob.payload.fields.keys()
    for name, tensor in blob.payload.fields.items():
        assert torch.equal(fields[name], tensor), name
        assert fields[name].dtype == tensor.dtype
    for name in ("page", "part", "parent_page", "tokens", "numbers", "num_prefilled", "metadata"):
        assert getattr(parsed, name) == getattr(blob, name)


@pytest.mark.parametrize("secret", SECRETS[:2])
def test_every_changed_byte_is_detected(secret: bytes | None) -> None:
    data = pack_blob(make_blob(), secret)
    for place in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            wrong = bytearray(data)
            wrong[place] ^= flip
            with pytest.raises(BlobError):
                parse_blob(wrong, secret)


@pytest.mark.parametrize("secret", SECRETS[:2])
def test_every_truncation_is_refused(secret: bytes | None) -> None:
    data = pack_blob(make_blob(), secret)
    for size in range(len(data)):
        with pytest.raises(BlobError):
            parse_blob(data[:size], secret)
    with pytest.raises(BlobError):
        parse_blob(data + b"\0", secret)


def test_without_the_secret_blobs_can_neither_be_read_nor_written() -> None:
    signed_blob, theirs = pack_blob(make_blob(), b"mine"), pack_blob(make_blob(), b"theirs")
    plain = pack_blob(make_blob())
    for data, secret in (
        (signed_blob, b"theirs"),
        (theirs, b"mine"),
        (plain, b"mine"),
        (signed_blob, None),
    ):
        with pytest.raises(BlobError):
            parse_blob(data, secret)


JsonObject = dict[str, Any]


def forge_blob(change: Callable[[JsonObject, JsonObject], object]) -> bytes:
    """Return a blob with a valid checksum and a changed header or layout."""
    data = bytes(pack_blob(make_blob()))
    _, length, more = HEAD.unpack_from(data)
    begin, stop = HEAD.size + length, HEAD.size + length + more
    header, layout = json.loads(data[HEAD.size : begin]), json.loads(data[begin:stop])
    payload = data[_align(stop) : -4]
    layout = change(header, layout) or layout
    parts = [json.dumps(part).encode() for part in (header, layout)]
    body = HEAD.pack(MAGIC, *map(len, parts)) + b"".join(parts)
    body += bytes(_align(len(body)) - len(body)) + payload
    return body + _compute_checksum(memoryview(body), None)


def _field(
    place: int, value: Any, name: str = "0/keys.codes"
) -> Callable[[JsonObject, JsonObject], None]:
    def change(_: JsonObject, layout: JsonObject) -> None:
        layout[name][place] = value

    return change


def _entry(name: str, value: Any) -> Callable[[JsonObject, JsonObject], None]:
    return lambda header, _: header.__setitem__(name, value)


FORGED = {
    "another version": _entry("version", 1),
    "more than there is": _field(1, [1 << 40]),
    "less than there is": _field(1, [0]),
    "a shape below zero": _field(1, [-7, -1]),
    "a shape that is no number": _field(1, ["7"]),
    "true as a shape": _field(1, [True]),
    "many dimensions": _field(1, [1] * 9 + [7]),
    "another place": _field(2, 0),
    "a dtype that there is not": _field(0, "complex64"),
    "more than its place": _field(1, [65]),
    "tokens that are text": _entry("tokens", "abc"),
    "tokens below zero": _entry("tokens", [-1]),
    "too many tokens": _entry("tokens", [0] * ((1 << 20) + 1)),
    "a page that is a list": _entry("page", []),
    "numbers that are floats": _entry("numbers", {"n": 0.5}),
    "numbers that are a list": _entry("numbers", [1]),
    "empty, and beyond all counting": _field(1, [0, 1 << 62, 1 << 62], "0/values.open"),
    "fields that are a list": lambda *_: [[]],
    "fields that are a number": lambda *_: 1,
    "a field that is a number": lambda *_: {"0/keys.codes": 1},
    "fewer fields than bytes": lambda _, layout: layout.clear(),
}


@pytest.mark.parametrize("change", FORGED)
def test_forged_header_is_refused(change: str) -> None:
    assert parse_blob(forge_blob(lambda *_: None)).tokens == (1, 2, 3)
    with pytest.raises(BlobError):
        parse_blob(forge_blob(FORGED[change]))


def test_blob_is_bound_to_its_key() -> None:
    blob = make_blob()
    data = pack_blob(blob)
    assert parse_named_blob(blob.page, blob.part, data).tokens == blob.tokens
    for page, part in ((blob.parent_page, blob.part), (blob.page, "k0-2")):
        with pytest.raises(BlobError, match=f"it belongs to {blob.page} k0-1"):
            parse_named_blob(page, part, data)


def test_blob_metadata_needs_no_secret() -> None:
    blob = make_blob()
    data = pack_blob(blob, b"a secret")
    assert read_metadata(data) == blob.metadata
    for size in range(HEAD.size + HEAD.unpack_from(data)[1]):
        assert read_metadata(data[:size]) == {}
    for raw in (b"[]", b"1", b'{"about": 1}', b'{"about": []}', b"\xff", b"[" * 100_000):
        assert read_metadata(HEAD.pack(MAGIC, len(raw), 0) + raw) == {}


@pytest.mark.parametrize("lengths", [(1 << 62, 0), (0, 1 << 62), (60, 60), (1 << 62, 1 << 62)])
def test_a_header_longer_than_all_bytes_is_refused(lengths: tuple[int, int]) -> None:
    body = HEAD.pack(MAGIC, *lengths) + bytes(64)
    with pytest.raises(BlobError, match="a header of"):
        parse_blob(body + _compute_checksum(memoryview(body), None))
