"""The structs of kvant.h by name: each is declared once, in C order."""

from __future__ import annotations

import struct
from collections.abc import Callable

ROWS = "{0} {0}_nbytes {0}_batch {0}_head {0}_row"  # kvant_rows
PAGES = "{0} {0}_nbytes {0}_slot {0}_head"  # kvant_pages
OPEN = f"{PAGES} {{0}}_row"  # kvant_open
POINTER = "{0} {0}_nbytes"
COUNTED = "{0} {0}_nbytes num_{0}"
TABLE = "{0} {0}_nbytes {0}_stride {0}_width"  # kvant_table
FOUR = "{0}_first {0}_second {0}_third {0}_last"  # kvant_four
ELEMENTS = f"{POINTER} {FOUR}"  # kvant_numbers


class RecordType:
    """A struct of 8-byte numbers: integers, except the fields named in `doubles`."""

    def __init__(self, *fields: str, doubles: tuple[str, ...] = ()) -> None:
        self.fields = tuple(" ".join(fields).split())
        assert len(set(self.fields)) == len(self.fields), "a field is declared twice"
        layout = struct.Struct("@" + "".join("d" if f in doubles else "q" for f in self.fields))
        self.size = layout.size
        self.pack: Callable[..., bytes] = layout.pack  # of all fields, in their order

    def index(self, field: str) -> int:
        """Return the position of a field among the numbers of a record."""
        return self.fields.index(field)
