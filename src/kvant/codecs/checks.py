"""What every codec refuses."""

from __future__ import annotations

from collections.abc import Collection


def check_choice(name: str, value: int, allowed: Collection[int]) -> None:
    # 4.0 and True would pass for integers, and then give sizes that are none.
    if type(value) is not int or value not in allowed:
        choices = ", ".join(map(str, allowed))
        raise ValueError(f"{name} is {value!r}; it must be one of {choices}")


def check_dim(dim: int, multiple: int = 8) -> None:
    if dim < 1 or dim % multiple:
        raise ValueError(f"rows have {dim} values; this format needs a multiple of {multiple}")
