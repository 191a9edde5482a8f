"""Old names of public attributes, which work for one release.

A class declares `old = RenamedAttribute("new")`. Reading `old` warns and returns `new`.
"""

from __future__ import annotations

import warnings
from typing import Any


class RenamedAttribute:
    """Forward an old attribute name to the new one, with a `DeprecationWarning`."""

    def __init__(self, new_name: str) -> None:
        self.new_name = new_name

    def __set_name__(self, owner: type, old_name: str) -> None:
        self.old_name = old_name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        warnings.warn(
            f"{type(instance).__name__}.{self.old_name} is now {self.new_name}; the next release "
            "removes the old name",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(instance, self.new_name)
