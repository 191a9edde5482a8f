"""Import names on first use, so that importing kvant imports little."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from importlib import import_module
from pkgutil import resolve_name
from typing import Any, TypeVar

T = TypeVar("T")


def lazy_names(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package: each name is imported from the module in `places`."""

    def import_name(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(places[name]), name)

    return import_name


class LazyModule:
    """A module that is imported on its first attribute access, so that type hints resolve."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


class Registry(MutableMapping[str, T]):
    """Objects by name; those of `places` ("module:object") are imported on first lookup."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = dict(places)
        self._objects: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._objects:
            self._objects[name] = resolve_name(self._places[name])
        return self._objects[name]

    def __setitem__(self, name: str, value: T) -> None:
        self._objects[name] = value

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        self._objects.pop(name, None)
        self._places.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._places, **self._objects})

    def __len__(self) -> int:
        return len({**self._places, **self._objects})

    def __contains__(self, name: object) -> bool:  # the mixin would import it
        return name in self._places or name in self._objects
