"""Recipes as JSON, for the headers of files.

A codec, a frame or a rule is an object with its "name" in CODECS, FRAMES or RETENTIONS; any other
recipe has a "kind". Nobody vouches for a header, so names are looked up in those dicts and nowhere
else, values have the types of the dataclass fields, and the constructors check them again. A key
that is missing takes the default of its field. Knows no layer count and no file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import lru_cache
from reprlib import repr as short
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from kvant.codecs import CODECS
from kvant.codecs.frames import FRAMES
from kvant.contracts import Codec, Frame, Pruning, Retention, Score, Selection
from kvant.dtypes import DTYPES
from kvant.errors import SpecError
from kvant.recipes import (
    KINDS,
    CacheSpec,
    LayerSpec,
    Recipe,
    RecurrentSpec,
)
from kvant.retention import RETENTIONS
from kvant.scores import SCORES
from kvant.spec.formats import nearest

PARTS = {name: KINDS[name] for name in ("attention", "recurrent")}
# What a field of this type may hold: the key that names it in JSON, and all that it can name.
TABLES: dict[Any, tuple[str, Mapping[str, Callable[..., Any]]]] = {
    CacheSpec: ("kind", {"cache": CacheSpec}),
    Recipe: ("kind", KINDS),
    LayerSpec | RecurrentSpec: ("kind", PARTS),
    Codec: ("name", CODECS),
    Frame: ("name", FRAMES),
    Retention: ("name", RETENTIONS),
    Selection: ("kind", {"selection": Selection}),
    Pruning: ("kind", {"pruning": Pruning}),
    Score: ("name", SCORES),
}


# Fields that recipes did not always have: where they say nothing, stores of before are still found.
UNTOLD = ("select", "prune")


def dumps(spec: CacheSpec) -> str:
    """`spec` as one line."""
    return json.dumps(encode(spec), separators=(",", ":"), allow_nan=False)


def loads(text: str) -> CacheSpec:
    """The spec that `text` describes, or a SpecError that says where it stops making sense."""
    try:
        value = json.loads(text, object_pairs_hook=distinct, parse_constant=refuse_constant)
        spec: CacheSpec = decode(CacheSpec, value, "spec")
    except SpecError:
        raise
    except (ValueError, RecursionError) as error:
        raise SpecError(f"the spec cannot be read as JSON: {error}") from error
    return spec


def encode(value: Any) -> Any:
    if is_dataclass(value):
        tag, name = label(value)
        given = {item.name: getattr(value, item.name) for item in fields(value) if item.init}
        told = {name: one for name, one in given.items() if one is not None or name not in UNTOLD}
        return {tag: name} | {name: encode(one) for name, one in told.items()}
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if value in DTYPES.values():
        return str(value).removeprefix("torch.")
    if value is None or type(value) in (int, bool, str, float):
        return value
    raise SpecError(
        f"{short(value)} has no JSON form; allowed: numbers, text, tuples, dataclasses,"
        f" {', '.join(DTYPES)}"
    )


def label(value: Any) -> tuple[str, str]:
    for tag, table in TABLES.values():
        for name, kind in table.items():
            if kind is type(value):
                return tag, name
    raise SpecError(
        f"{type(value).__name__} has no name; allowed: what CODECS, FRAMES and RETENTIONS list"
    )


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"a key comes twice in {short([key for key, _ in pairs])}")
    return dict(pairs)


def refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is no number")


def decode(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type `hint` says."""
    if hint in TABLES:
        return decode_named(hint, value, where)
    reader = READERS.get(get_origin(hint) or hint)
    if reader is None:
        raise SpecError(f"{where} is a field of type {short(hint)}, which has no JSON form")
    return reader(hint, value, where)


def decode_named(hint: Any, value: Any, where: str) -> Any:
    tag, table = TABLES[hint]
    if not isinstance(value, dict) or not isinstance(value.get(tag), str):
        raise wrong(where, value, f"an object with {tag!r}: one of {', '.join(table)}")
    name = value[tag]
    if name not in table:
        near = nearest(name, table)
        raise wrong(f"{where}.{tag}", name, f"one of {', '.join(table)}; nearest: {near}")
    kind: Any = table[name]
    own, hints = form(kind)
    check_keys(tag, own, value, where)
    given = {key: decode(hints[key], value[key], f"{where}.{key}") for key in own if key in value}
    try:
        return kind(**given)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise SpecError(f"{where}: {error}") from error


@lru_cache
def form(kind: type) -> tuple[dict[str, Field[Any]], dict[str, Any]]:
    """The fields of a dataclass and their types: a header may name it for each of many layers."""
    return {item.name: item for item in fields(kind) if item.init}, get_type_hints(kind)


def check_keys(tag: str, own: Mapping[str, Field[Any]], value: Any, where: str) -> None:
    for key in value:
        if key != tag and key not in own:
            keys = [*own, tag]
            raise SpecError(
                f"{where} has the key {short(key)}; allowed: {', '.join(keys)};"
                f" nearest: {nearest(key, keys)}"
            )
    for key, item in own.items():
        if key not in value and item.default is item.default_factory is MISSING:
            raise wrong(where, value, f"an object with {key!r}")


def decode_tuple(hint: Any, value: Any, where: str) -> Any:
    hints = get_args(hint)
    if not isinstance(value, list):
        raise wrong(where, value, "a list")
    if hints[-1] is ...:
        hints = hints[:1] * len(value)
    if len(hints) != len(value):
        raise wrong(where, value, f"a list of {len(hints)}")
    items = enumerate(zip(hints, value, strict=True))
    return tuple(decode(item, one, f"{where}[{i}]") for i, (item, one) in items)


def decode_optional(hint: Any, value: Any, where: str) -> Any:
    """`X | None`: the only union there is beside those in TABLES."""
    [inner] = [each for each in get_args(hint) if each is not NoneType]
    return None if value is None else decode(inner, value, where)


def decode_literal(hint: Any, value: Any, where: str) -> Any:
    for allowed in get_args(hint):
        if type(value) is type(allowed) and value == allowed:
            return value
    raise wrong(where, value, f"one of {', '.join(map(str, get_args(hint)))}")


def decode_dtype(hint: Any, value: Any, where: str) -> torch.dtype:
    if not isinstance(value, str) or value not in DTYPES:
        raise wrong(where, value, f"one of {', '.join(DTYPES)}")
    return DTYPES[value]


def decode_float(hint: Any, value: Any, where: str) -> float:
    # Compared before it is converted: an integer may be too long for that, or lose digits.
    number = type(value) in (int, float) and abs(value) <= sys.float_info.max
    if not number or float(value) != value:
        raise wrong(where, value, "a finite number")
    return float(value)


def decode_same(hint: Any, value: Any, where: str) -> Any:
    # not isinstance: a bool is an int there
    if type(value) is not hint:
        raise wrong(where, value, {int: "a whole number", bool: "true or false", str: "text"}[hint])
    return value


READERS: dict[Any, Callable[[Any, Any, str], Any]] = {
    tuple: decode_tuple,
    Union: decode_optional,
    UnionType: decode_optional,
    Literal: decode_literal,
    torch.dtype: decode_dtype,
    float: decode_float,
    int: decode_same,
    bool: decode_same,
    str: decode_same,
}


def wrong(where: str, value: Any, allowed: str) -> SpecError:
    return SpecError(f"{where} is {short(value)}; allowed: {allowed}")
