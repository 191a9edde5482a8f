"""Tables of objects by name: kvant's own, and those that programs and installed packages add.

A program adds one by `register`. A package lists it as an entry point of the table's group, such as
`kvant.codecs`:

    [project.entry-points."kvant.codecs"]
    int8row = "kvant_int8row:Int8"

Entry points are read once, when a name is neither kvant's own nor registered. An object is imported
only under its exact name, so a name in an untrusted file imports nothing else. A name that kvant or
another package has is never replaced. This module knows no codec, no score and no store.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from re import Pattern
from threading import Lock
from typing import Generic, NamedTuple, TypeVar

from kvant.errors import ExtensionError

T = TypeVar("T")


class Package(NamedTuple):
    """An installed distribution that provides an extension."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def normalized_name(self) -> str:
        """The name as package indexes compare it."""
        return re.sub("[-_.]+", "-", self.name).lower()


class Extension(NamedTuple):
    """An object that is not kvant's own, as files and `kvant formats` name it."""

    kind: str
    name: str
    package: Package | None  # None: a program registered it
    fault: str | None = None  # why the entry point of a package is not used

    def __str__(self) -> str:
        return f"{self.kind} {self.name} ({self.package or 'registered by a program'})"


class ExtensionTable(Mapping[str, T], Generic[T]):
    """The objects of one kind by name; those of packages are imported on first lookup.

    Names match `pattern` and are not in `list_reserved()`. `check(name, value)` raises an
    ExtensionError for an object that cannot be of this kind.
    """

    def __init__(
        self,
        kind: str,
        builtin: Mapping[str, T],
        check: Callable[[str, T], None],
        pattern: Pattern[str],
        list_reserved: Callable[[], Collection[str]] = frozenset,
    ) -> None:
        self.kind = kind
        self.group = f"kvant.{kind}s"  # of entry points
        self._builtin, self._check = builtin, check
        self._pattern, self._list_reserved = pattern, list_reserved
        self._added: dict[str, tuple[T, Package | None]] = {}  # registered, or loaded
        self._lock = Lock()  # of `_added`; never held while a package is imported

    def register(self, name: str, value: T) -> None:
        """Add an object; the same object again changes nothing."""
        fault = self._find_name_fault(name)
        installed = self._valid_entries.get(name, [])
        if fault is None and not all(_lists_object(entry, value) for entry in installed):
            fault = f"the package {_get_package(installed[0])} lists a {self.kind} of this name"
        if fault is None and (known := self.find_name(value)) not in (None, name):
            fault = f"it is the {self.kind} {known!r} already"
        if fault is not None:
            raise ExtensionError(f"the {self.kind} {name!r}: {fault}: choose another")
        self._check(name, value)
        with self._lock:
            package = _get_package(installed[0]) if installed else None
            present, _ = self._added.setdefault(name, (value, package))
        if present is not value:
            raise ExtensionError(
                f"the {self.kind} {name!r}: {present!r} is registered under this name: choose"
                " another, or restart Python if it was changed"
            )

    def find_name(self, value: T) -> str | None:
        """Return the name of an object, also if its package lists it and it was never looked up."""
        tables: tuple[Mapping[str, T], ...] = self._builtin, {n: v for n, (v, _) in self._list()}
        for name, present in (item for table in tables for item in table.items()):
            if present is value:
                return name
        listed = self._valid_entries.items()
        names = (name for name, entries in listed if _lists_object(entries[0], value))
        return next((name for name in names if self[name] is value), None)

    def find_extension(self, name: str) -> Extension | None:
        """Return what provides a known name, without importing it; None if it is kvant's own."""
        if name in self._builtin:
            return None
        if name in self._added:
            return Extension(self.kind, name, self._added[name][1])
        package = _get_package(self._valid_entries[name][0])
        return Extension(self.kind, name, package, self._find_entry_fault(name))

    def list_extensions(self) -> list[Extension]:
        """List registered objects and entry points, without importing any."""
        listed = [Extension(self.kind, name, package) for name, (_, package) in self._list()]
        for entry in self._entry_points:
            if entry.name not in self._added:
                fault = self._find_entry_fault(entry.name)
                listed.append(Extension(self.kind, entry.name, _get_package(entry), fault))
        return listed

    def __getitem__(self, name: str) -> T:
        if name in self._builtin:
            return self._builtin[name]
        if name not in self._added:
            self._load(name)
        return self._added[name][0]

    def __contains__(self, name: object) -> bool:
        """Return whether a name is known, without importing its object."""
        return name in self._builtin or name in self._added or name in self._valid_entries

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._builtin, *dict(self._list()), *self._valid_entries]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _list(self) -> list[tuple[str, tuple[T, Package | None]]]:
        with self._lock:
            return [*self._added.items()]

    @cached_property
    def _entry_points(self) -> list[EntryPoint]:
        """The entry points of installed packages, in an order that does not depend on paths."""
        entries = entry_points(group=self.group)
        return sorted(entries, key=lambda entry: (entry.name, _get_package(entry)))

    @cached_property
    def _valid_entries(self) -> Mapping[str, list[EntryPoint]]:
        """The entry points of valid names; a name that several packages list has several."""
        by_name: dict[str, list[EntryPoint]] = {}
        for entry in self._entry_points:
            if self._find_name_fault(entry.name) is None:
                by_name.setdefault(entry.name, []).append(entry)
        return by_name

    def _find_name_fault(self, name: str) -> str | None:
        """Return why a name is not allowed; None if it is."""
        if name in self._builtin:
            return f"kvant has a {self.kind} of this name"
        if not self._pattern.fullmatch(name):
            return f"allowed are names that match {self._pattern.pattern}"
        if name in self._list_reserved():
            return "kvant uses this word for something else"
        return None

    def _find_entry_fault(self, name: str) -> str | None:
        """Return why no entry point of this name is used; None if one is."""
        if len(entries := self._valid_entries.get(name, [])) > 1:
            return f"several packages list it: {', '.join(str(_get_package(e)) for e in entries)}"
        return self._find_name_fault(name)

    def _load(self, name: str) -> None:
        """Import the object that a package lists, and check it."""
        entry, *others = self._valid_entries[name]
        package = _get_package(entry)
        if others:
            fault = self._find_entry_fault(name)
            raise ExtensionError(f"the {self.kind} {name!r}: {fault}: uninstall all but one")
        try:
            value = entry.load()
            self._check(name, value)
        except Exception as error:
            raise ExtensionError(
                f"the {self.kind} {name!r} of the package {package} cannot be used:"
                f" {type(error).__name__}: {error}; update or uninstall {package.name}"
            ) from error
        with self._lock:
            self._added.setdefault(name, (value, package))


def _get_package(entry: EntryPoint) -> Package:
    assert entry.dist is not None  # `entry_points` sets it
    return Package(str(entry.dist.name), str(entry.dist.version))


def _lists_object(entry: EntryPoint, value: object) -> bool:
    """Return whether an entry point names an object, as far as that is known without an import."""
    place = [getattr(value, name, "") for name in ("__module__", "__qualname__")]
    imported: object = sys.modules.get(entry.module)
    for name in entry.attr.split("."):
        imported = getattr(imported, name, None)
    return imported is value or place == [entry.module, entry.attr]
