"""Sizes and counts as text. KB to TB are powers of 1000, KiB to TiB powers of 1024."""

from __future__ import annotations

import re
from reprlib import repr as short

from kvant.errors import SpecError

UNITS: dict[str, int] = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
UNITS_BY_SPELLING = {name.lower(): name for name in UNITS}  # 4gib, and 4G for 4GB
UNITS_BY_SPELLING |= {name[:-1].lower(): name for name in UNITS if len(name) > 1}
MIN_BARE_SIZE = 1024  # a smaller number without a unit is a mistake, unless it is 0
SIZE_PATTERN = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Return the bytes of "1.5GiB", "800 MB", "8G" or "4096", rounded down."""
    match = SIZE_PATTERN.fullmatch(text.strip())
    if match is None:
        raise SpecError(
            f"size {short(text)}: a number and a unit are allowed, such as 1.5GiB;"
            f" units are {', '.join(UNITS)}"
        )
    number, unit = match[1], UNITS_BY_SPELLING.get(match[2].lower() or "b")
    if unit is None:
        raise SpecError(
            f"size {short(text)}: unit {match[2]!r} is not one of {', '.join(UNITS)};"
            f" nearest: {number}GB"
        )
    if not match[2] and 0 < float(number) < MIN_BARE_SIZE:
        raise SpecError(
            f"size {short(text)}: {number} bytes: add a unit, such as {number}GiB or {number}B"
        )
    whole, _, fraction = number.partition(".")
    # Integers only: a float would round sizes above 2**53.
    denominator: int = 10 ** len(fraction)
    return int(whole + fraction) * UNITS[unit] // denominator


def as_bytes(size: int | str) -> int:
    """Return a number of bytes, parsed if it is text."""
    return parse_size(size) if isinstance(size, str) else size


def format_size(nbytes: int) -> str:
    """Format bytes in the largest unit of at least 1: "1.5 GiB", "312 B"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(nbytes) >= UNITS[unit]:
            return f"{nbytes / UNITS[unit]:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{nbytes} B"


def format_count(count: int, noun: str) -> str:
    """Format a count with its noun: "1 turn", "2 turns"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
