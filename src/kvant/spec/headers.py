"""Encode recipes as JSON for file headers, and decode them.

A recipe is a JSON object. Codecs, frames, retention rules and scores have a "name", which is a key
of CODEC_TABLE, FRAMES, RETENTION_TABLE or SCORE_TABLE; all others have a "kind". Headers are
untrusted: names are looked up in those tables only, values must have the types of the dataclass
fields, and constructors check them again. A missing key takes the default of its field. Callers
check the number of layers.
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
from kvant.contracts import Codec, Frame, PageSelection
from kvant.errors import ExtensionError, SpecError
from kvant.platform.extensions import ExtensionTable
from kvant.platform.torch_runtime import DTYPES
from kvant.recipes import (
    RECIPES_BY_KIND,
    CacheSpec,
    LayerSpec,
    Recipe,
    RecurrentSpec,
)
from kvant.retention import RETENTIONS, SCORES, Pruning, Retention, Score
from kvant.spec.formats import find_nearest
from kvant.spec.tables import CODEC_TABLE, RETENTION_TABLE, SCORE_TABLE

PART_RECIPES = {name: RECIPES_BY_KIND[name] for name in ("attention", "recurrent")}
Classes = Mapping[str, Callable[..., Any]]  # by name
# Type of a field: the JSON key that names its class, and the classes.
OWN_TYPES: dict[Any, tuple[str, Classes]] = {
    CacheSpec: ("kind", {"cache": CacheSpec}),
    Recipe: ("kind", RECIPES_BY_KIND),
    LayerSpec | RecurrentSpec: ("kind", PART_RECIPES),
    Frame: ("name", FRAMES),
    PageSelection: ("kind", {"selection": PageSelection}),
    Pruning: ("kind", {"pruning": Pruning}),
}
EXTENSIBLE_TYPES: dict[Any, ExtensionTable[Any]] = {
    Codec: CODEC_TABLE,
    Retention: RETENTION_TABLE,
    Score: SCORE_TABLE,
}
OWN_EXTENSIBLE_CLASSES: tuple[Classes, ...] = CODECS, RETENTIONS, SCORES
NAMED_TYPES: dict[Any, tuple[str, Classes]] = OWN_TYPES | {
    hint: ("name", table) for hint, table in EXTENSIBLE_TYPES.items()
}

# Fields added later: omitted while None, so that the JSON of a spec, and with it the keys of older
# stores, stay as they were.
OMITTED_IF_NONE = ("select", "prune")


def dumps(spec: CacheSpec) -> str:
    """Encode `spec` as one line of JSON."""
    return json.dumps(encode(spec), separators=(",", ":"), allow_nan=False)


def loads(text: str) -> CacheSpec:
    """Decode a spec, or raise a SpecError that names the invalid part."""
    try:
        value = json.loads(
            text, object_pairs_hook=reject_duplicate_keys, parse_constant=refuse_constant
        )
        spec: CacheSpec = decode(CacheSpec, value, "spec")
    except (SpecError, ExtensionError):
        raise
    except (ValueError, RecursionError) as error:
        raise SpecError(f"the spec cannot be read as JSON: {error}") from error
    return spec


def encode(value: Any) -> Any:
    """Encode a recipe or one of its fields as a JSON value."""
    if is_dataclass(value):
        tag, name = find_label(value)
        field_values = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        return {tag: name} | {
            field_name: encode(field_value)
            for field_name, field_value in field_values.items()
            if field_value is not None or field_name not in OMITTED_IF_NONE
        }
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


def find_label(value: object) -> tuple[str, str]:
    """Return the JSON key and the name of a recipe's class."""
    recipe_class = type(value)
    own_tables = [*OWN_TYPES.values(), *(("name", classes) for classes in OWN_EXTENSIBLE_CLASSES)]
    for tag, classes in own_tables:
        for name, own_class in classes.items():
            if own_class is recipe_class:
                return tag, name
    names = (table.find_name(recipe_class) for table in EXTENSIBLE_TYPES.values())
    for found in names:
        if found is not None:
            return "name", found
    raise SpecError(
        f"{recipe_class.__name__} has no name in files; allowed: kvant's own classes, and those"
        " that kvant.register_codec, register_score or register_retention were given"
    )


def check_round_trip(value: Any) -> None:
    """Raise unless the fields of a dataclass are the same after a file."""
    value_type: Any = type(value)
    known_fields, hints = get_field_types(value_type)
    if "name" in known_fields:
        raise SpecError("a field is called name, as the key of the class in files")
    for name in known_fields:
        field_value = getattr(value, name)
        if decode(hints[name], encode(field_value), name) != field_value:
            raise SpecError(f"{name}={short(field_value)} is read back as another value")


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"a key occurs twice in {short([key for key, _ in pairs])}")
    return dict(pairs)


def refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is not a number")


def decode(hint: Any, value: Any, path: str) -> Any:
    """Decode a JSON value as the type `hint`; `path` names it in errors: "spec.layers[0]"."""
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
        nearest = find_nearest(name, table)
        raise make_value_error(
            f"{path}.{tag}", name, f"one of {', '.join(table)}; nearest: {nearest}"
        )
    recipe_class: Any = table[name]
    known_fields, hints = get_field_types(recipe_class)
    check_keys(tag, known_fields, value, path)
    arguments = {
        key: decode(hints[key], value[key], f"{path}.{key}") for key in known_fields if key in value
    }
    try:
        return recipe_class(**arguments)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise SpecError(f"{path}: {error}") from error


@lru_cache
def get_field_types(recipe_type: type) -> tuple[dict[str, Field[Any]], dict[str, Any]]:
    """Return the fields of a dataclass and their types; cached, since most layers need the same."""
    return {f.name: f for f in fields(recipe_type) if f.init}, get_type_hints(recipe_type)


def check_keys(
    tag: str, known_fields: Mapping[str, Field[Any]], value: Mapping[str, Any], path: str
) -> None:
    """Refuse unknown keys, and missing keys without a default."""
    for key in value:
        if key != tag and key not in known_fields:
            keys = [*known_fields, tag]
            raise SpecError(
                f"{path} has the key {short(key)}; allowed: {', '.join(keys)};"
                f" nearest: {find_nearest(key, keys)}"
            )
    for key, field in known_fields.items():
        if key not in value and field.default is field.default_factory is MISSING:
            raise make_value_error(path, value, f"an object with {key!r}")


def decode_tuple(hint: Any, value: Any, path: str) -> Any:
    hints = get_args(hint)
    if not isinstance(value, list):
        raise make_value_error(path, value, "a list")
    if hints[-1] is ...:
        hints = hints[:1] * len(value)
    if len(hints) != len(value):
        raise make_value_error(path, value, f"a list of {len(hints)}")
    pairs = enumerate(zip(hints, value, strict=True))
    return tuple(decode(item_hint, item, f"{path}[{i}]") for i, (item_hint, item) in pairs)


def decode_optional(hint: Any, value: Any, path: str) -> Any:
    """Decode `X | None`, the only union that is not in NAMED_TYPES."""
    [inner] = [member for member in get_args(hint) if member is not NoneType]
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
    # Compare first: float() of a long integer overflows or loses digits.
    is_in_range = type(value) in (int, float) and abs(value) <= sys.float_info.max
    if not is_in_range or float(value) != value:
        raise make_value_error(path, value, "a finite number")
    return float(value)


def decode_exact(hint: Any, value: Any, path: str) -> Any:
    # type(), because isinstance(True, int) holds
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
