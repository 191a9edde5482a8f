"""Name the packages whose codecs, scores and retention rules a spec uses, in the header of a file.

A reader that lacks one is refused with what to install. The name and the version come from the
writer: a header is untrusted, so they have the form of those of packages, and nothing is imported
under them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from inspect import getsource
from reprlib import repr as short
from typing import Any, TypeVar

from kvant.errors import CacheFileError
from kvant.platform.extensions import Extension, ExtensionTable, Package
from kvant.recipes import CacheSpec, iterate_attention
from kvant.spec.tables import CODEC_TABLE, NAME, RETENTION_TABLE, SCORE_TABLE, TABLES

T = TypeVar("T")
PACKAGE = re.compile("[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?", re.ASCII)
VERSION = re.compile("[A-Za-z0-9.!+_-]{1,99}", re.ASCII)


def list_extensions(spec: CacheSpec) -> list[Extension]:
    """List the codecs, scores and retention rules of a spec that are not kvant's own."""
    used: dict[Extension, None] = {}  # in order, each once
    for layer in iterate_attention(*spec.layers):
        rules = [] if layer.prune is None else [layer.prune]
        extensions = [
            *(_find_extension(CODEC_TABLE, type(codec)) for codec in (layer.keys, layer.values)),
            *(_find_extension(SCORE_TABLE, type(rule.score)) for rule in rules),
            _find_extension(RETENTION_TABLE, type(layer.retention)),
        ]
        used |= dict.fromkeys(extension for extension in extensions if extension is not None)
    return [*used]


def _find_extension(table: ExtensionTable[T], value: T) -> Extension | None:
    name = table.find_name(value)
    return None if name is None else table.find_extension(name)


def encode_extensions(extensions: Iterable[Extension]) -> list[dict[str, str | None]]:
    """Return extensions as a JSON value for the header of a file."""
    return [
        {"kind": kind, "name": name, "package": None, "version": None}
        | ({} if package is None else {"package": package.name, "version": package.version})
        for kind, name, package, _ in extensions
    ]


def decode_extensions(value: Any, source: str) -> tuple[Extension, ...]:
    """Return the extensions that an untrusted header names; raise if one is not installed here."""
    try:
        extensions = tuple(_decode_extension(**entry) for entry in value)
    except (TypeError, ValueError) as error:
        raise CacheFileError(f"{source}: invalid extensions in its header: {error}") from error
    for extension in extensions:
        _check_available(extension, source)
    return extensions


def check_extensions_used(extensions: Iterable[Extension], spec: CacheSpec) -> None:
    """Raise a ValueError unless a header names exactly the extensions that its spec uses."""
    named = {(extension.kind, extension.name) for extension in extensions}
    used = {(extension.kind, extension.name) for extension in list_extensions(spec)}
    if named != used:
        raise ValueError(f"its header names the extensions {named}, its spec uses {used}")


def _decode_extension(kind: Any, name: Any, package: Any, version: Any) -> Extension:
    parts = [(name, NAME)]
    parts += [] if package is version is None else [(package, PACKAGE), (version, VERSION)]
    for text, pattern in parts:
        if not isinstance(text, str) or not pattern.fullmatch(text):
            raise ValueError(f"{short(text)} does not match {pattern.pattern}")
    if not isinstance(kind, str) or kind not in TABLES:
        raise ValueError(f"{short(kind)} is not one of {', '.join(TABLES)}")
    return Extension(kind, name, None if package is None else Package(package, version))


def _check_available(extension: Extension, source: str) -> None:
    """Raise unless the extension is here and of the same origin; import nothing."""
    kind, name, package, _ = extension
    table = TABLES[kind]
    origin = "that a program registered" if package is None else f"of the package {package}"
    uses = f"{source} uses the {kind} {name!r} {origin}"
    way_out = (
        f"call kvant.register_{kind} first" if package is None else f"pip install {package.name}"
    )
    if name not in table:
        faults = [x.fault for x in table.list_extensions() if x.name == name and x.fault]
        if faults:
            raise CacheFileError(f"{uses}, which cannot be used here: {faults[0]}")
        raise CacheFileError(f"{uses}: {way_out}")
    here = table.find_extension(name)
    if here is None:
        raise CacheFileError(f"{uses}, but here it is kvant's own: read it where it was written")
    if here.fault is not None:
        raise CacheFileError(f"{uses}, which cannot be used here: {here.fault}")
    names = [None if p is None else p.normalized_name for p in (package, here.package)]
    if names[0] != names[1]:
        found = "a program registered it" if here.package is None else f"it is of {here.package}"
        drop = "do not register it" if here.package is None else "uninstall that"
        raise CacheFileError(f"{uses}, but here {found}: {drop}; {way_out}")


def identify_extensions(spec: CacheSpec) -> list[str]:
    """Return a text for each extension of a spec that changes with its origin and version.

    The code of a class that a program registered stands for its version.
    """
    texts = []
    for kind, name, package, _ in list_extensions(spec):
        if package is not None:
            version = f"{package.normalized_name} {package.version}"
        else:
            try:
                version = getsource(TABLES[kind][name])
            except (OSError, TypeError):  # typed into an interpreter
                version = f"{TABLES[kind][name].__qualname__}, without source"
        texts.append(f"{kind} {name} {version}")
    return texts
