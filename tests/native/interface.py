"""The structs of src/native/kvant.h as ctypes, parsed from the header, so that they cannot
differ.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HEADER = Path(__file__).parents[2] / "src" / "native" / "kvant.h"
NUMBERS = {"int64_t": ctypes.c_int64, "double": ctypes.c_double}
ENTRIES = {
    "attend": "kvant_request",
    "store": "kvant_store_request",
    "rotate": "kvant_rotate_request",
    "norm": "kvant_norm_request",
    "choose": "kvant_choose_request",
    "multiply": "kvant_multiply_request",
    "map": "kvant_map_request",
}
POINTED = {  # structs that a request points to
    "attend": {"keys": "kvant_side", "values": "kvant_side", "extent": "kvant_extent"},
    "store": {
        "steps": "kvant_steps",
        "side[0].stored": "kvant_side",
        "side[1].stored": "kvant_side",
    },
    "choose": {"extent": "kvant_extent"},
    "multiply": {"weight": "kvant_weight"},
}


class Pointer(ctypes.c_void_p):
    """A pointer type distinct from 8-byte numbers."""


class Field(NamedTuple):
    """A field of a request or of a struct inside it."""

    path: str
    kind: Any
    holder: Any
    name: str

    @property
    def value(self) -> Any:
        value = getattr(self.holder, self.name)
        return value.value or 0 if isinstance(value, Pointer) else value

    def set(self, value: Any) -> None:
        setattr(self.holder, self.name, self.kind(value))


def _structs(text: str) -> dict[str, type[ctypes.Structure]]:
    structs: dict[str, type[ctypes.Structure]] = {}
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    for body, struct in re.findall(r"typedef struct \{(.*?)\} (\w+);", text, flags=re.DOTALL):
        fields: list[tuple[str, Any]] = []
        for line in filter(None, map(str.strip, body.split(";"))):
            type_name, names = re.fullmatch(r"(?:const )?(\w+) (.*)", line, re.DOTALL).groups()
            for name in map(str.strip, names.split(",")):
                bare, count = re.fullmatch(r"\*?(\w+)(?:\[(\d+)\])?", name).groups()
                of = Pointer if name[0] == "*" else NUMBERS.get(type_name) or structs[type_name]
                fields.append((bare, of * int(count) if count else of))
        structs[struct] = type(struct, (ctypes.Structure,), {"_fields_": fields})
    return structs


STRUCTS = _structs(HEADER.read_text())


def places(holder: Any, path: str = "") -> Iterator[Field]:
    """Yield every pointer and number of a struct, in order."""
    for name, field_type in holder._fields_:
        field_path = f"{path}{name}"
        if issubclass(field_type, ctypes.Structure):
            yield from places(getattr(holder, name), field_path + ".")
        elif issubclass(field_type, ctypes.Array):
            for i, element in enumerate(getattr(holder, name)):
                yield from places(element, f"{field_path}[{i}].")
        else:
            yield Field(field_path, field_type, holder, name)


def all_places(entry: str) -> Iterator[Field]:
    """Yield those of the request and of all structs that it points to."""
    yield from places(STRUCTS[ENTRIES[entry]]())
    for path, name in POINTED.get(entry, {}).items():
        yield from places(STRUCTS[name](), f"{path}.")


def load_functions(path: str) -> ctypes.CDLL:
    functions = ctypes.CDLL(path)
    for entry in ENTRIES:
        getattr(functions, f"kvant_{entry}").restype = ctypes.c_char_p
    return functions
