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
from kvant.contracts import Codec, Frame, PageSelection, Pruning, Retention, Score
from kvant.dtypes import DTYPES
from kvant.errors import SpecError
from kvant.recipes import (
    RECIPES_BY_KIND,
    CacheSpec,
    LayerSpec,
    Recipe,
    RecurrentSpec,
)
from kvant.retention import RETENTIONS
from kvant.scores import SCORES
from kvant.spec.formats import find_nearest

PART_RECIPES = {name: RECIPES_BY_KIND[name] for name in ("attention", "recurrent")}
# What a field of this type may hold: the key that names it in JSON, and all that it can name.
NAMED_TYPES: dict[Any, tuple[str, Mapping[str, Callable[..., Any]]]] = {
    CacheSpec: ("kind", {"cache": CacheSpec}),
    Recipe: ("kind", RECIPES_BY_KIND),
    LayerSpec | RecurrentSpec: ("kind", PART_RECIPES),
    Codec: ("name", CODECS),
    Frame: ("name", FRAMES),
    Retention: ("name", RETENTIONS),
    PageSelection: ("kind", {"selection": PageSelection}),
    Pruning: ("kind", {"pruning": Pruning}),
    Score: ("name", SCORES),
}


# Fields that recipes did not always have: where they say nothing, stores of before are still found.
OMITTED_IF_NONE = ("select", "prune")


def dumps(spec: CacheSpec) -> str:
    """`spec` as one line."""
    return json.dumps(encode(spec), separators=(",", ":"), allow_nan=False)


def loads(text: str) -> CacheSpec:
    """The spec that `text` describes, or a SpecError that says where it stops making sense."""
    try:
        value = json.loads(
            text, object_pairs_hook=reject_duplicate_keys, parse_constant=refuse_constant
        )
        spec: CacheSpec = decode(CacheSpec, value, "spec")
    except SpecError:
        raise
    except (ValueError, RecursionError) as error:
        raise SpecError(f"the spec cannot be read as JSON: {error}") from error
    return spec


def encode(value: Any) -> Any:
    if is_dataclass(value):
        tag, name = find_label(value)
        given = {item.name: getattr(value, item.name) for item in fields(value) if item.init}
        told = {
            name: one
            for name, one in given.items()
            if one is not None or name not in OMITTED_IF_NONE
        }
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


def find_label(value: Any) -> tuple[str, str]:
    for tag, table in NAMED_TYPES.values():
        for name, kind in table.items():
            if kind is type(value):
                return tag, name
    raise SpecError(
        f"{type(value).__name__} has no name; allowed: what CODECS, FRAMES and RETENTIONS list"
    )


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"a key comes twice in {short([key for key, _ in pairs])}")
    return dict(pairs)


def refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is no number")


def decode(hint: Any, value: Any, path: str) -> Any:
    """`value` as the type `hint` says."""
    if hint in NAMED_TYPES:
        return decode_named(hint, value, path)
    reader = DECODERS.get(get_origin(hint) or hint)
    if reader is None:
        raise SpecError(f"{path} is a field of type {short(hint)}, which has no JSON form")
    return reader(hint, value, path)


def decode_named(hint: Any, value: Any, path: str) -> Any:
    tag, table = NAMED_TYPES[hint]
    if not isinstance(value, dict) or not isinstance(value.get(tag), str):
        raise make_value_error(path, value, f"an object with {tag!r}: one of {', '.join(table)}")
    name = value[tag]
    if name not in table:
        near = find_nearest(name, table)
        raise make_value_error(f"{path}.{tag}", name, f"one of {', '.join(table)}; nearest: {near}")
    kind: Any = table[name]
    own, hints = get_field_types(kind)
    check_keys(tag, own, value, path)
    given = {key: decode(hints[key], value[key], f"{path}.{key}") for key in own if key in value}
    try:
        return kind(**given)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise SpecError(f"{path}: {error}") from error


@lru_cache
def get_field_types(recipe_type: type) -> tuple[dict[str, Field[Any]], dict[str, Any]]:
    """The fields of a dataclass and their types: a header may name it for each of many layers."""
    return {item.name: item for item in fields(recipe_type) if item.init}, get_type_hints(
        recipe_type
    )


def check_keys(tag: str, known_fields: Mapping[str, Field[Any]], value: Any, path: str) -> None:
    for key in value:
        if key != tag and key not in known_fields:
            keys = [*known_fields, tag]
            raise SpecError(
                f"{path} has the key {short(key)}; allowed: {', '.join(keys)};"
                f" nearest: {find_nearest(key, keys)}"
            )
    for key, item in known_fields.items():
        if key not in value and item.default is item.default_factory is MISSING:
            raise make_value_error(path, value, f"an object with {key!r}")


def decode_tuple(hint: Any, value: Any, path: str) -> Any:
    hints = get_args(hint)
    if not isinstance(value, list):
        raise make_value_error(path, value, "a list")
    if hints[-1] is ...:
        hints = hints[:1] * len(value)
    if len(hints) != len(value):
        raise make_value_error(path, value, f"a list of {len(hints)}")
    items = enumerate(zip(hints, value, strict=True))
    return tuple(decode(item, one, f"{path}[{i}]") for i, (item, one) in items)


def decode_optional(hint: Any, value: Any, path: str) -> Any:
    """`X | None`: the only union there is beside those in TABLES."""
    [inner] = [each for each in get_args(hint) if each is not NoneType]
    return None if value is None else decode(inner, value, path)


def decode_literal(hint: Any, value: Any, path: str) -> Any:
    for allowed in get_args(hint):
        if type(value) is type(allowed) and value == allowed:
            return value
    raise make_value_error(path, value, f"one of {', '.join(map(str, get_args(hint)))}")


def decode_dtype(hint: Any, value: Any, path: str) -> torch.dtype:
    if not isinstance(value, str) or value not in DTYPES:
        raise make_value_error(path, value, f"one of {', '.join(DTYPES)}")
    return DTYPES[value]


def decode_float(hint: Any, value: Any, path: str) -> float:
    # Compared before it is converted: an integer may be too long for that, or lose digits.
    number = type(value) in (int, float) and abs(value) <= sys.float_info.max
    if not number or float(value) != value:
        raise make_value_error(path, value, "a finite number")
    return float(value)


def decode_exact(hint: Any, value: Any, path: str) -> Any:
    # not isinstance: a bool is an int there
    if type(value) is not hint:
        raise make_value_error(
            path, value, {int: "a whole number", bool: "true or false", str: "text"}[hint]
        )
    return value


DECODERS: dict[Any, Callable[[Any, Any, str], Any]] = {
    tuple: decode_tuple,
    Union: decode_optional,
    UnionType: decode_optional,
    Literal: decode_literal,
    torch.dtype: decode_dtype,
    float: decode_float,
    int: decode_exact,
    bool: decode_exact,
    str: decode_exact,
}


def make_value_error(path: str, value: Any, allowed: str) -> SpecError:
    return SpecError(f"{path} is {short(value)}; allowed: {allowed}")
