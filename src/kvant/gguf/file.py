"""The header of a GGUF file, checked before any other reader trusts its counts.

    | magic, version | counts of tensors and of values | values | tensor entries | data, aligned |

Strings and arrays are preceded by their length, and a tensor's entry states where its data lie. All
of them must be inside the file. Lists are skipped, and read if they are asked for.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

MAGIC, VERSIONS = b"GGUF", (2, 3)
MAX_NAME_BYTES = 1 << 16
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 16
MAX_ITEMS = 1 << 16  # values, or tensors
MAX_LIST_ITEMS = 1 << 21  # large vocabularies have 500,000 merges; readers take 400 bytes for each
DEFAULT_ALIGNMENT = 32
STRING, ARRAY, UINT32 = 8, 9, 4
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
MIN_VALUE_BYTES = 8 + 4 + 1  # of a key, its type and a value
MIN_ENTRY_BYTES = 8 + 4 + 8 + 4 + 8  # of a tensor with one dimension


class BlockLayout(NamedTuple):
    """The values of a block of a tensor type, and its bytes."""

    name: str
    values: int
    nbytes: int


TENSOR_TYPES = {  # by ggml's number
    0: BlockLayout("F32", 1, 4),
    1: BlockLayout("F16", 1, 2),
    2: BlockLayout("Q4_0", 32, 18),
    3: BlockLayout("Q4_1", 32, 20),
    6: BlockLayout("Q5_0", 32, 22),
    7: BlockLayout("Q5_1", 32, 24),
    8: BlockLayout("Q8_0", 32, 34),
    10: BlockLayout("Q2_K", 256, 84),
    11: BlockLayout("Q3_K", 256, 110),
    12: BlockLayout("Q4_K", 256, 144),
    13: BlockLayout("Q5_K", 256, 176),
    14: BlockLayout("Q6_K", 256, 210),
    16: BlockLayout("IQ2_XXS", 256, 66),
    17: BlockLayout("IQ2_XS", 256, 74),
    18: BlockLayout("IQ3_XXS", 256, 98),
    19: BlockLayout("IQ1_S", 256, 50),
    20: BlockLayout("IQ4_NL", 32, 18),
    21: BlockLayout("IQ3_S", 256, 110),
    22: BlockLayout("IQ2_S", 256, 82),
    23: BlockLayout("IQ4_XS", 256, 136),
    29: BlockLayout("IQ1_M", 256, 56),
    30: BlockLayout("BF16", 1, 2),
    34: BlockLayout("TQ1_0", 256, 54),
    35: BlockLayout("TQ2_0", 256, 66),
}


class GGUFError(ValueError):
    """What is wrong with a file, in one line."""


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor's blocks lie in the file. `shape` is that of torch: outputs, inputs."""

    name: str
    type: BlockLayout
    shape: tuple[int, ...]
    begin: int
    nbytes: int


class ListEntry(NamedTuple):
    """Where the items of a list lie in the file."""

    kind: int
    num_items: int
    begin: int


@dataclass(frozen=True)
class GGUFHeader:
    """The scalar values of a file, where its lists lie, and its tensors by name."""

    path: Path
    values: Mapping[str, object]
    lists: Mapping[str, ListEntry]
    tensors: Mapping[str, TensorEntry]

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture", ""))

    def get_setting(self, key: str) -> Any:
        """Return a value of the architecture, such as `block_count`; None if there is none."""
        return self.values.get(f"{self.architecture}.{key}")


def read_header(path: Path) -> GGUFHeader:
    """Read and check the header of a file; raise GGUFError if any of it is wrong."""
    try:
        with path.open("rb") as file:
            if not (size := path.stat().st_size):
                raise GGUFError("it is empty")
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
                return _HeaderReader(path, data).read()
    except OSError as error:
        raise GGUFError(f"it cannot be read: {error.strerror}") from error


def read_list(header: GGUFHeader, key: str) -> list[Any]:
    """Return the items of a list: texts or numbers; none if the file has no such list."""
    if (entry := header.lists.get(key)) is None:
        return []
    with (
        header.path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        if entry.kind in SCALARS:
            return list(
                struct.unpack_from(f"<{entry.num_items}{SCALARS[entry.kind]}", data, entry.begin)
            )
        items, at = list[str](), entry.begin
        for _ in range(entry.num_items):
            (length,) = struct.unpack_from("<Q", data, at)
            items.append(data[at + 8 : at + 8 + length].decode(errors="replace"))
            at += 8 + length
        return items


class _HeaderReader:
    """Reads forward through a file, and never beyond its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0
        self.lists = dict[str, ListEntry]()

    def read(self) -> GGUFHeader:
        if (magic := self._take(4)) != MAGIC:
            raise GGUFError(f"it is no GGUF file: it begins with {magic!r}")
        version = self._number("I")
        if version not in VERSIONS:
            raise GGUFError(
                f"version {version} is unknown: {VERSIONS[0]} and {VERSIONS[1]} are read"
            )
        num_tensors = self._count("tensors", MIN_ENTRY_BYTES, MAX_ITEMS)
        num_values = self._count("values", MIN_VALUE_BYTES, MAX_ITEMS)
        values = dict[str, object]()
        for _ in range(num_values):
            key = self._name()
            if key in values:
                raise GGUFError(f"{key!r} occurs twice")
            values[key] = self._value(key, self._number("I"))
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT:
            raise GGUFError(f"general.alignment is {alignment!r}: 1 to {MAX_ALIGNMENT} are valid")
        begin = -(-self.at // alignment) * alignment
        tensors = dict[str, TensorEntry]()
        for entry in entries:
            placed = self._place(entry, begin, alignment)
            if placed.name in tensors:
                raise GGUFError(f"tensor {placed.name!r} occurs twice")
            tensors[placed.name] = placed
        if (total := sum(entry.nbytes for entry in tensors.values())) > len(self.data):
            raise GGUFError(f"its tensors have {total} bytes, the file {len(self.data)}")
        return GGUFHeader(self.path, values, self.lists, tensors)

    def _take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise GGUFError(f"it ends at byte {len(self.data)}, inside its header")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def _number(self, code: str) -> int:
        return int(struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0])

    def _count(self, name: str, least_nbytes: int, most: int | None = None) -> int:
        """Read a number of items; that many must fit into the rest of the file."""
        count = self._number("Q")
        if count * least_nbytes > len(self.data) - self.at:
            raise GGUFError(f"it states {count} {name}, more than its {len(self.data)} bytes hold")
        if most is not None and count > most:
            raise GGUFError(f"it states {count} {name}: at most {most} are read")
        return count

    def _name(self) -> str:
        length = self._number("Q")
        if length > MAX_NAME_BYTES:
            raise GGUFError(f"a name has {length} bytes: at most {MAX_NAME_BYTES} are read")
        return self._text(length)

    def _text(self, length: int) -> str:
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise GGUFError(f"text at byte {self.at - length} is not UTF-8") from error

    def _value(self, key: str, kind: int) -> object:
        if kind in SCALARS:
            return struct.unpack(
                f"<{SCALARS[kind]}", self._take(struct.calcsize(f"<{SCALARS[kind]}"))
            )[0]
        if kind == STRING:
            return self._text(self._count("bytes of text", 1))
        if kind != ARRAY:
            raise GGUFError(f"{key!r} has the unknown type {kind}")
        element = self._number("I")
        if element != STRING and element not in SCALARS:
            raise GGUFError(f"{key!r} is a list of the unknown type {element}")
        size = 8 if element == STRING else struct.calcsize(f"<{SCALARS[element]}")
        items = "texts" if element == STRING else "values"
        count = self._count(f"{items} of {key!r}", size, MAX_LIST_ITEMS)
        self.lists[key] = ListEntry(element, count, self.at)
        if element != STRING:
            self._take(size * count)
            return None
        for _ in range(count):
            self._take(self._count("bytes of text", 1))
        return None

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, dimensions, type and offset of a tensor."""
        name, num_dims = self._name(), self._number("I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise GGUFError(f"tensor {name!r} has {num_dims} dimensions: 1 to {MAX_DIMS} are valid")
        dims = tuple(self._number("Q") for _ in range(num_dims))
        return name, dims, self._number("I"), self._number("Q")

    def _place(
        self, entry: tuple[str, tuple[int, ...], int, int], begin: int, alignment: int
    ) -> TensorEntry:
        name, dims, number, offset = entry
        layout = TENSOR_TYPES.get(number)
        if layout is None:
            known = ", ".join(t.name for t in TENSOR_TYPES.values())
            raise GGUFError(f"tensor {name!r} has the unknown type {number}; known are {known}")
        if not all(dims) or dims[0] % layout.values:
            raise GGUFError(
                f"tensor {name!r} of {dims} values has no whole blocks of {layout.name}"
            )
        nbytes = prod(dims) // layout.values * layout.nbytes
        if offset % alignment or begin + offset + nbytes > len(self.data):
            raise GGUFError(
                f"tensor {name!r} has {nbytes} bytes at {begin + offset}, the file {len(self.data)}"
            )
        return TensorEntry(name, layout, dims[::-1], begin + offset, nbytes)
