"""Amounts of memory in words: KB, MB, GB, TB are powers of 1000, KiB to TiB powers of 1024."""

from __future__ import annotations

import re
from reprlib import repr as short

from kvant.errors import SpecError

UNITS: dict[str, int] = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Bytes in "1.5GiB", "800 MB" or "4096": what is left of a byte is dropped."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise SpecError(
            f"size {short(text)}: a number and a unit are allowed, such as 1.5GiB;"
            f" units are {', '.join(UNITS)}"
        )
    number, unit = match[1], match[2] or "B"
    if unit not in UNITS:
        near = number + nearest_unit(unit)
        raise SpecError(
            f"size {short(text)}: unit {unit!r} is not one of {', '.join(UNITS)}; nearest: {near}"
        )
    whole, _, part = number.partition(".")
    # integers throughout: a float would round sizes above 2**53
    denominator: int = 10 ** len(part)
    return int(whole + part) * UNITS[unit] // denominator


def nearest_unit(unit: str) -> str:
    for name in UNITS:
        if name.lower() in (unit.lower(), f"{unit}b".lower()):
            return name
    return "GB"


def format_size(nbytes: int) -> str:
    """The largest unit of 1024 with a number of at least 1: "1.5 GiB", "312 B"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(nbytes) >= UNITS[unit]:
            return f"{nbytes / UNITS[unit]:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{nbytes} B"
