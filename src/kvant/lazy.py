"""Import names, and derive values, on first use.

`lazy_names`, `LazyModule` and `Registry` import later, so that importing kvant imports little.

`Derived` has the values that a reader derives from an object once, and stores in the object's
`derived`. Each kind of value is declared by one `Memo`, beside the type of the value. So the module
of the owner knows none of its readers, and the type checker knows the type of each value:

    SIDE: Memo[NativeSide] = Memo("the side's record")
    side = tensors.derived.get(SIDE)
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from importlib import import_module
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Generic, TypeVar

T = TypeVar("T")


def lazy_names(package: str, names_by_module: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package, which imports names on first use.

    `names_by_module` has the names of each module, separated by spaces.
    """
    modules = {name: module for module, names in names_by_module.items() for name in names.split()}

    def import_name(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return import_name


class LazyModule:
    """A module that is imported on its first attribute access, so that type hints resolve."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


class Registry(UserDict[str, T]):
    """Objects by name; those of `places` ("module:object") are imported on first lookup."""

    data: dict[str, Any]  # an object, or its place until then

    def __init__(self, places: Mapping[str, str]) -> None:
        super().__init__()
        self.data.update(places)

    def __getitem__(self, name: str) -> T:
        if isinstance(self.data[name], str):
            self.data[name] = resolve_name(self.data[name])
        found: T = self.data[name]
        return found


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
