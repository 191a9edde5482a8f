"""Values that a reader derives from an object once, and stores in the object's `derived`.

Each kind of value is declared by one `Memo`, beside the type of the value. So the module of the
owner knows none of its readers, and the type checker knows the type of each value:

    SIDE: Memo[NativeSide] = Memo("the side's record")
    side = tensors.derived.get(SIDE)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

T = TypeVar("T")


class Memo(Generic[T]):
    """The key of one kind of derived value; no other memo equals it."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Memo({self.name!r})"


if TYPE_CHECKING:

    class Derived:
        """The derived values of one object, by memo."""

        def get(self, memo: Memo[T], /) -> T | None: ...
        def setdefault(self, memo: Memo[T], value: T, /) -> T: ...
        def __getitem__(self, memo: Memo[T], /) -> T: ...
        def __setitem__(self, memo: Memo[T], value: T, /) -> None: ...

else:  # a token looks up several values per layer, so a lookup must not be a Python call
    Derived = dict
