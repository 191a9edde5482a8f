"""A file of requests to the native library with their expected outputs, for replay.cpp.

The file is a sequence of 8-byte little-endian integers:

    MAGIC, number of chunks, their sizes, number of requests, requests, bytes of all chunks
    request    function, name, blocks, pointers, checks; each list after its length
    name       its bytes, padded to a multiple of 8
    block      bytes, address modulo 64, numbers of its chunks; block 0 is the request
    pointer    block and offset of the pointer, block and offset of its target
    check      kind, block, bound (a double), values per row, bytes and chunks of what is expected

Memory is stored in chunks of at most 4,096 bytes, each distinct one once: requests share most of
their memory.
"""

from __future__ import annotations

import array
import ctypes
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from native.cases import nbytes_of
from native.interface import ENTRIES, POINTED, STRUCTS, Field, Pointer, places

MAGIC = b"KVANTREC"
CHUNK = 4096
ALIGNMENT = 64
# Kinds of checks. Blocks without a check must not change.
SAME_BYTES = 0
SAME_FLOAT32, SAME_BFLOAT16, SAME_FLOAT16 = 1, 2, 3  # the same bytes, or NaN of other bits
FLOAT32, BFLOAT16, FLOAT16 = 4, 5, 6  # within a bound
LOG_SUM_EXP = 7  # float32, each within a bound


class Block(NamedTuple):
    """Memory that one or several pointers of a request lead to."""

    address: int
    nbytes: int

    def read(self) -> bytes:
        return ctypes.string_at(self.address, self.nbytes)


class Check(NamedTuple):
    """What a block holds after the call: these bytes, or numbers close to these float64 values."""

    kind: int
    block: int
    content: bytes
    bound: float = 0.0  # of the error, relative to the norm of all values
    row: int = 1  # values of a row, whose error has a bound of its own


def get_offset(field: Field, root: int) -> int:
    """Return the distance of a field from an address."""
    return ctypes.addressof(field.holder) + getattr(type(field.holder), field.name).offset - root


class RequestMemory:
    """The memory of a request: its fields, its blocks, and the pointers between them."""

    def __init__(self, entry: str, packed: bytes) -> None:
        self.entry = entry
        self.request = STRUCTS[ENTRIES[entry]].from_buffer_copy(packed)
        self.fields = {field.path: field for field in places(self.request)}
        for path, name in POINTED.get(entry, {}).items():
            if address := self.fields[path].value:
                pointed = STRUCTS[name].from_address(address)
                self.fields |= {field.path: field for field in places(pointed, f"{path}.")}
        begin = ctypes.addressof(self.request)
        self.blocks = [Block(begin, len(packed)), *self._merge_ranges()]
        self._begins = [block.address for block in self.blocks[1:]]
        self.pointers = [
            (*self.locate(get_offset(field, 0)), *self.locate(field.value))
            for field in self._list_pointers()
        ]

    def _list_pointers(self) -> list[Field]:
        return [field for field in self.fields.values() if field.kind is Pointer and field.value]

    def _merge_ranges(self) -> list[Block]:
        """Return the memory of all pointers; ranges that overlap become one block."""
        blocks: list[Block] = []
        pointers = self._list_pointers()
        ranges = [(field.value, self.fields[nbytes_of(field.path)].value) for field in pointers]
        for address, nbytes in sorted(ranges):
            if blocks and address < blocks[-1].address + max(blocks[-1].nbytes, 1):
                begin = blocks[-1].address
                end = max(begin + blocks[-1].nbytes, address + nbytes)
                blocks[-1] = Block(begin, end - begin)
            else:
                blocks.append(Block(address, nbytes))
        return blocks

    def locate(self, address: int) -> tuple[int, int]:
        """Return the block of an address, and its offset there."""
        own = self.blocks[0]
        if own.address <= address < own.address + own.nbytes:
            return 0, address - own.address
        number = bisect_right(self._begins, address)
        return number, address - self.blocks[number].address

    def read_blocks(self) -> list[bytes]:
        """Return the content of all blocks, with zeros for addresses."""
        contents = [bytearray(block.read()) for block in self.blocks]
        for block, offset, _, _ in self.pointers:
            contents[block][offset : offset + 8] = bytes(8)
        return [bytes(content) for content in contents]

    def list_numbers(self) -> tuple[Any, ...]:
        """Return all numbers of the request and of the structs that it points to, except sizes."""
        fields = (field for field in self.fields.values() if field.kind is not Pointer)
        return tuple(field.value for field in fields if not field.name.endswith("nbytes"))


class Recording:
    """Requests, and the distinct chunks of their memory."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._requests = bytearray()
        self.count = self.nbytes = 0

    def add(
        self,
        name: str,
        memory: RequestMemory,
        contents: Sequence[bytes],
        checks: Sequence[Check],
        max_nbytes: int,
    ) -> bool:
        """Add a request, with the content of its blocks before the call.

        Return False if the file would grow by more than `max_nbytes`.
        """
        everything = [*contents, *(check.content for check in checks)]
        chunks = {chunk for content in everything for chunk in _split(content)}
        added = sum(map(len, chunks - self._numbers.keys()))
        if added > max_nbytes:
            return False
        before = len(self._requests)
        encoded = name.encode()
        self._write(list(ENTRIES).index(memory.entry), len(encoded))
        self._requests += encoded + bytes(-len(encoded) % 8)
        self._write(len(contents))
        for block, content in zip(memory.blocks, contents, strict=True):
            self._write(len(content), block.address % ALIGNMENT, *self._add_chunks(content))
        self._write(len(memory.pointers))
        for pointer in memory.pointers:
            self._write(*pointer)
        self._write(len(checks))
        for check in checks:
            self._write(check.kind, check.block)
            self._requests += struct.pack("<d", check.bound)
            self._write(check.row, len(check.content), *self._add_chunks(check.content))
        self.count += 1
        self.nbytes += added + len(self._requests) - before
        return True

    def save(self, path: Path) -> None:
        chunks = self._numbers
        with path.open("wb") as file:
            file.write(MAGIC + array.array("q", [len(chunks), *map(len, chunks)]).tobytes())
            file.write(struct.pack("<q", self.count) + self._requests)
            file.writelines(chunks)

    def _write(self, *numbers: int) -> None:
        self._requests += array.array("q", numbers).tobytes()

    def _add_chunks(self, content: bytes) -> list[int]:
        """Return the numbers of the chunks of this memory."""
        numbers = self._numbers
        return [numbers.setdefault(chunk, len(numbers)) for chunk in _split(content)]


def _split(content: bytes) -> Iterator[bytes]:
    for first in range(0, len(content), CHUNK):
        yield content[first : first + CHUNK]
