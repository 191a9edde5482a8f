"""src/native/kvant.h as ctypes has it, read from the header: so nothing here can differ from it."""

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
POINTED = {  # of a request: the structs that it points to
    "attend": {"keys": "kvant_side", "values": "kvant_side", "extent": "kvant_extent"},
    "store": {
        "steps": "kvant_steps",
        "side[0].stored": "kvant_side",
        "side[1].stored": "kvant_side",
    },
    "choose": {"extent": "kvant_extent"},
}


class Pointer(ctypes.c_void_p):
    """Apart from a number of 8 bytes."""


class Place(NamedTuple):
    """A field of a request, whatever struct inside of it has it."""

    path: str
    kind: Any
    holder: Any
    name: str

    @property
    def value(self) -> Any:
        found = getattr(self.holder, self.name)
        return found.value or 0 if isinstance(found, Pointer) else found

    def set(self, value: Any) -> None:
        setattr(self.holder, self.name, self.kind(value))


def _structs(text: str) -> dict[str, type[ctypes.Structure]]:
    found: dict[str, type[ctypes.Structure]] = {}
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    for body, struct in re.findall(r"typedef struct \{(.*?)\} (\w+);", text, flags=re.DOTALL):
        fields: list[tuple[str, Any]] = []
        for line in filter(None, map(str.strip, body.split(";"))):
            kind, names = re.fullmatch(r"(?:const )?(\w+) (.*)", line, re.DOTALL).groups()
            for name in map(str.strip, names.split(",")):
                bare, count = re.fullmatch(r"\*?(\w+)(?:\[(\d+)\])?", name).groups()
                of = Pointer if name[0] == "*" else NUMBERS.get(kind) or found[kind]
                fields.append((bare, of * int(count) if count else of))
        found[struct] = type(struct, (ctypes.Structure,), {"_fields_": fields})
    return found


STRUCTS = _structs(HEADER.read_text())


def places(holder: Any, path: str = "") -> Iterator[Place]:
    """Every pointer and number of a struct, in their order."""
    for name, kind in holder._fields_:
        own = f"{path}{name}"
        if issubclass(kind, ctypes.Structure):
            yield from places(getattr(holder, name), own + ".")
        elif issubclass(kind, ctypes.Array):
            for i, one in enumerate(getattr(holder, name)):
                yield from places(one, f"{own}[{i}].")
        else:
            yield Place(own, kind, holder, name)


def all_places(entry: str) -> Iterator[Place]:
    """Those of the request and of all that it points to."""
    yield from places(STRUCTS[ENTRIES[entry]]())
    for path, name in POINTED.get(entry, {}).items():
        yield from places(STRUCTS[name](), f"{path}.")


def loaded(path: str) -> ctypes.CDLL:
    functions = ctypes.CDLL(path)
    for entry in ENTRIES:
        getattr(functions, f"kvant_{entry}").restype = ctypes.c_char_p
    return functions
