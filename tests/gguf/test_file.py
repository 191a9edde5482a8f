"""Test that damaged and hostile GGUF files are refused in one line, without allocations."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from kvant.gguf.file import GGUFError, read_header, read_list

NUM_MUTATIONS = 3000


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def value(key: bytes, kind: int, packed: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + packed


def tensor(name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


VALUES = [
    value(b"general.architecture", 8, text(b"llama")),
    value(b"general.alignment", 4, struct.pack("<I", 32)),
    value(b"some.flag", 7, b"\x01"),
    value(b"tokens", 9, struct.pack("<IQ", 8, 2) + text(b"a") + text(b"bc")),
    value(b"scores", 9, struct.pack("<IQ2f", 6, 2, 0.5, 1.5)),
]
TENSORS = [tensor(b"token_embd.weight", (64, 3), 8, 0), tensor(b"norm", (5,), 0, 224)]


def build(
    values: list[bytes] = VALUES,
    tensors: list[bytes] = TENSORS,
    *,
    counts: tuple[int, int] | None = None,
    version: int = 3,
    data: int = 256,
) -> bytes:
    counts = counts or (len(tensors), len(values))
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(values + tensors)
    return header + bytes(-len(header) % 32) + bytes(data)


def read(content: bytes, folder: Path) -> Any:
    (folder / "one.gguf").write_bytes(content)
    return read_header(folder / "one.gguf")


def test_header_lists_values_and_tensors(tmp_path: Path) -> None:
    content = build()
    header = read(content, tmp_path)
    assert header.architecture == "llama" and header.values["some.flag"] is True
    assert header.values["tokens"] is None  # lists are skipped
    embedding, norm = header.tensors.values()
    assert (embedding.shape, embedding.type.name, embedding.nbytes) == ((3, 64), "Q8_0", 204)
    assert (norm.begin, norm.nbytes) == (len(content) - 256 + 224, 20)


BIG = 1 << 60
WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it is empty"),
    "magic": (b"GGML" + build()[4:], "it is no GGUF file: it begins with b'GGML'"),
    "version": (build(version=1), "version 1 is unknown: 2 and 3 are read"),
    "big endian": (build(version=3 << 24), "version 50331648 is unknown"),
    "tensors": (build(counts=(BIG, 5)), f"it states {BIG} tensors, more than"),
    "values": (build(counts=(2, BIG)), f"it states {BIG} values, more than"),
    "cut": (build()[:100], "inside its header"),
    "key": (build([struct.pack("<Q", BIG)]), f"a name has {BIG} bytes"),
    "string": (build([value(b"a", 8, struct.pack("<Q", BIG))]), "bytes of text, more than"),
    "list": (build([value(b"a", 9, struct.pack("<IQ", 4, BIG))]), "values of 'a', more than"),
    "texts": (build([value(b"a", 9, struct.pack("<IQ", 8, BIG))]), "texts of 'a', more than"),
    "nested": (build([value(b"a", 9, struct.pack("<IQ", 9, 1))]), "a list of the unknown type 9"),
    "type": (build([value(b"a", 13, bytes(8))]), "'a' has the unknown type 13"),
    "twice": (build([VALUES[0]] * 2), "'general.architecture' occurs twice"),
    "not text": (build([value(b"\xff", 7, b"\x01")]), "is not UTF-8"),
    "alignment": (
        build([value(b"general.alignment", 4, struct.pack("<I", 0))]),
        "general.alignment is 0",
    ),
    "dimensions": (build(tensors=[tensor(b"t", (1,) * 5, 0, 0)]), "'t' has 5 dimensions"),
    "no dimension": (build(tensors=[tensor(b"t", (), 0, 0)] * 2), "'t' has 0 dimensions"),
    "zero": (build(tensors=[tensor(b"t", (0, 3), 0, 0)]), "no whole blocks of F32"),
    "blocks": (build(tensors=[tensor(b"t", (33,), 8, 0)]), "no whole blocks of Q8_0"),
    "huge": (build(tensors=[tensor(b"t", (BIG, BIG), 0, 0)]), "bytes at"),
    "kind": (build(tensors=[tensor(b"t", (32,), 99, 0)]), "has the unknown type 99; known are F32"),
    "offset": (build(tensors=[tensor(b"t", (32,), 0, BIG)]), "bytes at"),
    "unaligned": (build(tensors=[tensor(b"t", (4,), 0, 8)]), "bytes at"),
    "beyond": (build(tensors=[tensor(b"t", (64,), 0, 32)]), "has 256 bytes at"),
    "two tensors": (build(tensors=[TENSORS[0]] * 2), "tensor 'token_embd.weight' occurs twice"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_file_is_refused(name: str, tmp_path: Path) -> None:
    content, message = WRONG[name]
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError) as error:
            read(content, tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert message in str(error.value) and "\n" not in str(error.value)
    assert peak < 1 << 20


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="it cannot be read: No such file"):
        read_header(tmp_path / "none.gguf")


def test_every_cut_is_refused(tmp_path: Path) -> None:
    content = build()
    for length in range(len(content) - 12):
        with pytest.raises(GGUFError):
            read(content[:length], tmp_path)


def test_changed_bytes_give_a_header_or_one_line(tmp_path: Path) -> None:
    rng, whole = random.Random(0), build()
    for _ in range(NUM_MUTATIONS):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(content))
            content[at : at + 8] = rng.choice(
                (rng.randbytes(8), bytes(8), b"\xff" * 8, struct.pack("<Q", rng.getrandbits(40)))
            )
        try:
            header = read(bytes(content), tmp_path)
        except GGUFError as error:
            assert "\n" not in str(error)
        else:
            size = len(content)
            assert all(t.begin + t.nbytes <= size for t in header.tensors.values())


def test_long_lists_are_refused(tmp_path: Path) -> None:
    """Readers take hundreds of bytes for an item."""
    items = struct.pack("<IQ", 0, 1 << 24) + bytes(1 << 24)
    with pytest.raises(GGUFError, match="states 16777216 values of 'x': at most 2097152 are read"):
        read(build([VALUES[0], value(b"x", 9, items)]), tmp_path)


def test_lists_are_read(tmp_path: Path) -> None:
    header = read(build(), tmp_path)
    assert read_list(header, "tokens") == ["a", "bc"]
    assert read_list(header, "scores") == [0.5, 1.5]
    assert read_list(header, "absent") == []
