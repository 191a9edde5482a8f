"""Limits on JSON schemas, checked before llguidance compiles them.

llguidance counts the steps of its work and stops at a limit. Four parts of a schema escape its
count, at compiling or when a mask is computed:

    patterns that apply to one string     each derivative multiplies their branches
    multipleOf                            a state for each remainder of the values of one place
    patternProperties                     compared in pairs, again in each alternative
    levels that `$ref` connects           recursion: a deep one overflows the stack of the process

This check follows `allOf`, `anyOf`, `oneOf` and `$ref` as llguidance does, to find the schemas that
apply to one value. It may count too much, never too little, and its own work is limited.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from kvant.errors import GrammarError

MAX_LEVELS = 500  # the stack of 8 MiB overflowed at 1,000 to 2,000
MAX_PATTERN_PAIRS = 64 * 64  # of patternProperties
MAX_REMAINDERS = 20_000  # of multipleOf, over all places: a quarter of a second
MAX_NODES = 100_000  # that the count of levels visits
MAX_COMBINATIONS = 100_000  # of the branches of patterns that apply together
MAX_VISITS = 20_000  # of schemas, by this check
MAX_APPLIED = 64  # schemas that apply to one value, and nested allOf, anyOf, oneOf and $ref

CHARACTERS_PER_BRANCH = 6  # of a pattern: "[ab]c|" is one branch
FORMAT_BRANCHES = 8
LENGTH_BRANCHES = 2

# Keys whose values map names to schemas, and keys whose values are no schemas.
MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
DATA = {"enum", "const", "default", "examples", "discriminator"}
UNIONS = ("anyOf", "oneOf")
PATTERNS = "patternProperties"
CONSTRAINTS = {"pattern", "format", "minLength", "maxLength", "multipleOf", "enum", "const"}
PARTS = {"properties", "patternProperties", "additionalProperties"}
PARTS |= {"prefixItems", "items", "additionalItems"}

Schema = dict[str, Any]
Schemas = tuple[Schema, ...]


def check_schemas(schemas: Iterable[Any]) -> None:
    """Raise GrammarError for JSON schemas that together could take unlimited time or memory."""
    counts = _Counts()
    for schema in schemas:
        if isinstance(schema, dict):
            _check_levels(schema, counts)
            _PlaceWalk(schema, counts).run()


@dataclass
class _Counts:
    """What the limits count, over all schemas of a grammar."""

    nodes: int = 0
    visits: int = 0
    combinations: int = 0
    pattern_pairs: int = 0
    remainders: int = 0


def _check_levels(root: Schema, counts: _Counts) -> None:
    """Count the levels of the schema and of all that it refers to."""
    num_levels, has_ids, has_references = 0, False, False
    waiting, targets = [root], {id(root)}
    while waiting:
        deepest, nodes = 0, [(waiting.pop(), 0)]
        while nodes:
            node, level = nodes.pop()
            deepest, counts.nodes = max(deepest, level), counts.nodes + 1
            if counts.nodes > MAX_NODES:
                raise GrammarError(
                    f"a JSON schema whose $ref name more than {MAX_NODES} parts, each counted as "
                    "often as it is named: name fewer, or smaller ones"
                )
            has_ids = has_ids or (node is not root and bool(_find_id(node)))
            has_references = has_references or isinstance(node.get("$ref"), str)
            target = _resolve(root, node)
            if target is not None and id(target) not in targets:
                targets.add(id(target))
                waiting.append(target)
            nodes += [(child, level + 1) for child in _iterate_subschemas(node)]
        num_levels += deepest + 1
        if num_levels > MAX_LEVELS:
            raise GrammarError(
                f"a JSON schema of {num_levels} levels or more, those of $ref included: at most "
                f"{MAX_LEVELS} are allowed; nest less, or split it"
            )
    if has_ids and has_references:  # it changes what the references below it name
        raise GrammarError("a JSON schema with $ref and an inner $id: leave out the inner $id")


class _PlaceWalk:
    """A walk over the places of a schema: the schemas that apply to one value together."""

    def __init__(self, root: Schema, counts: _Counts) -> None:
        self._root, self._counts = root, counts
        self._expansions: dict[int, list[Schemas]] = {}
        self._open: set[int] = set()  # being expanded
        self._unions: dict[int, Schema] = {}  # of the properties that a schema does not name

    def run(self) -> None:
        places: list[Schemas] = [(self._root,)]
        seen: set[tuple[int, ...]] = set()
        while places:
            place = places.pop()
            key = tuple(map(id, place))
            if key in seen:
                continue
            seen.add(key)
            factors, multiples = [self._expand(schema) for schema in place], list[Decimal]()
            for applied in self._combine(factors) if len(factors) != 1 else factors[0]:
                self._check_string(applied)
                self._check_patterns(applied)
                multiples += _list_multiples(applied)
                places += self._iterate_parts(applied)
            self._check_multiples(multiples)

    def _visit(self, count: int) -> None:
        self._counts.visits += count
        if self._counts.visits > MAX_VISITS:
            raise GrammarError(
                f"a JSON schema of more than {MAX_VISITS} combinations of allOf, anyOf, oneOf and "
                "$ref: leave some of them out"
            )

    def _expand(self, schema: Schema) -> list[Schemas]:
        """Return the alternatives of a schema: each a set of schemas that apply together."""
        if (known := self._expansions.get(id(schema))) is not None:
            return known
        if id(schema) in self._open:  # llguidance refuses such a circle
            return [()]
        if len(self._open) >= MAX_APPLIED:
            raise GrammarError(
                f"a JSON schema of more than {MAX_APPLIED} nested allOf, anyOf, oneOf and $ref: "
                "nest less"
            )
        self._open.add(id(schema))
        own = (schema,) if not schema.keys().isdisjoint(CONSTRAINTS | PARTS) else ()
        factors: list[list[Schemas]] = [[own]]
        factors += [self._expand(part) for part in _get_schemas(schema, "allOf")]
        if (target := _resolve(self._root, schema)) is not None:
            factors.append(self._expand(target))
        for key in UNIONS:
            options = [self._expand(option) for option in _get_schemas(schema, key)]
            if options:
                factors.append(list(itertools.chain.from_iterable(options)))
        self._open.remove(id(schema))
        alternatives = list(self._combine(factors))
        self._expansions[id(schema)] = alternatives
        return alternatives

    def _combine(self, factors: list[list[Schemas]]) -> Iterator[Schemas]:
        """Yield every choice of one alternative per factor, as one set."""
        self._visit(math.prod(map(len, factors)))
        for choice in itertools.product(*factors):
            applied = tuple(itertools.chain.from_iterable(choice))
            self._visit(len(applied))
            if len(applied) > MAX_APPLIED:
                raise GrammarError(
                    f"a JSON schema in which {len(applied)} schemas apply to one value (allOf, "
                    f"$ref): at most {MAX_APPLIED} are allowed; merge them"
                )
            yield applied

    def _check_string(self, applied: Schemas) -> None:
        branches, num_values = list(map(int, _iterate_branches(applied))), 1
        for schema in applied:
            if isinstance(schema.get("enum"), list):
                num_values *= max(1, len(schema["enum"]))
        if len(branches) < 2 and (not branches or num_values == 1):
            return
        self._counts.combinations += math.prod(branches) * num_values
        if self._counts.combinations > MAX_COMBINATIONS:
            raise GrammarError(
                f"a JSON schema whose strings obey several constraints together: {len(branches)} "
                "of one string (pattern, format, minLength, maxLength) bring the combinations to "
                f"{_shorten(self._counts.combinations)}, at most {MAX_COMBINATIONS} are allowed; "
                "merge the patterns, or shorten them"
            )

    def _check_multiples(self, values: list[Decimal]) -> None:
        """Count the remainders of the values of one place: at most their product."""
        if not values:
            return
        scale = max(0, *(-int(value.as_tuple().exponent) for value in values))
        self._counts.remainders += math.prod({int(value * 10**scale) for value in values})
        if self._counts.remainders > MAX_REMAINDERS:
            raise GrammarError(
                f"multipleOf {' and '.join(map(_shorten, values))}: with it, all multipleOf have "
                f"{_shorten(self._counts.remainders)} remainders (the product of the values of "
                f"one number, without decimal points), at most {MAX_REMAINDERS} are allowed; "
                "leave it out and check the number in the reply"
            )

    def _check_patterns(self, applied: Schemas) -> None:
        counts = [count for schema in applied if (count := len(_get_map(schema, PATTERNS)))]
        self._counts.pattern_pairs += sum(counts) ** 2 * len(counts)
        if self._counts.pattern_pairs > MAX_PATTERN_PAIRS:
            raise GrammarError(
                f"a JSON schema whose patternProperties, {sum(counts)} of one object, bring the "
                f"pairs to compare to {self._counts.pattern_pairs}: at most {MAX_PATTERN_PAIRS} "
                "are allowed; merge the patterns, or use additionalProperties"
            )

    def _iterate_parts(self, applied: Schemas) -> Iterator[Schemas]:
        """Yield the places below a place: of each property, of other properties, of each item."""
        if all(schema.keys().isdisjoint(PARTS) for schema in applied):
            return
        names = dict.fromkeys(name for schema in applied for name in _get_map(schema, "properties"))
        for name in (*names, None):
            self._visit(len(applied))
            yield tuple(part for schema in applied for part in self._get_property(schema, name))
        for index in range(max((len(_get_prefix(schema)) for schema in applied), default=0) + 1):
            self._visit(len(applied))
            yield tuple(part for schema in applied for part in _get_item(schema, index))

    def _get_property(self, schema: Schema, name: str | None) -> list[Schema]:
        """Return the schemas of a property; None is any that the schema does not name."""
        properties, patterns = _get_map(schema, "properties"), _get_map(schema, PATTERNS)
        if not patterns:
            return _select_schemas([properties.get(name, schema.get("additionalProperties"))])
        if id(schema) not in self._unions:
            options = [*patterns.values(), schema.get("additionalProperties"), {}]
            self._unions[id(schema)] = {"anyOf": _select_schemas(options)}
        return [*_select_schemas([properties.get(name)]), self._unions[id(schema)]]


def _iterate_branches(applied: Schemas) -> Iterator[int]:
    """Yield the number of branches of each regular expression of a string."""
    for schema in applied:
        if isinstance(pattern := schema.get("pattern"), str):
            yield 2 + len(pattern) // CHARACTERS_PER_BRANCH
        if isinstance(schema.get("format"), str):
            yield FORMAT_BRANCHES
    if any("minLength" in schema or "maxLength" in schema for schema in applied):
        yield LENGTH_BRANCHES


def _list_multiples(applied: Schemas) -> list[Decimal]:
    """Return the values of multipleOf but 0, which llguidance refuses."""
    values = list[Decimal]()
    for schema in applied:
        value = schema.get("multipleOf")
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            continue
        if value == int(value):
            values.append(Decimal(abs(int(value))))
        else:
            values.append(Decimal(repr(value)).copy_abs().normalize())
    return [value for value in values if value]


def _resolve(root: Schema, schema: Schema) -> Schema | None:
    """Return the schema that `$ref` names; None without one, or if llguidance cannot find it."""
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return None
    address = reference.removeprefix(_find_id(root).rstrip("#"))
    if address not in ("", "#") and not address.startswith("#/"):
        raise GrammarError(
            f"$ref {reference[:100]!r}: only a path in the same schema is allowed, as #/$defs/name"
        )
    node: Any = root
    for step in unquote(address).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            is_index = key.isdecimal() and len(key) < 10 and int(key) < len(node)
            node = node[int(key)] if is_index else None
        else:
            node = node.get(key) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else None


def _find_id(schema: Schema) -> str:
    """Return the address that a schema gives itself; `id` in old drafts."""
    return next((schema[key] for key in ("$id", "id") if isinstance(schema.get(key), str)), "")


def _iterate_subschemas(schema: Schema) -> Iterator[Schema]:
    """Yield the schemas one level below, whatever their keys."""
    for key, value in schema.items():
        if key in MAPS and isinstance(value, dict):
            yield from _select_schemas(value.values())
        elif key not in DATA and not key.startswith("x-"):
            yield from _select_schemas(value if isinstance(value, list) else [value])


def _get_map(schema: Schema, key: str) -> Mapping[str | None, Any]:
    value = schema.get(key)
    return value if isinstance(value, dict) else {}


def _get_schemas(schema: Schema, key: str) -> list[Schema]:
    value = schema.get(key)
    return _select_schemas(value) if isinstance(value, list) else []


def _get_prefix(schema: Schema) -> list[Any]:
    lists = [schema.get("prefixItems"), schema.get("items")]
    return next((value for value in lists if isinstance(value, list)), [])


def _get_item(schema: Schema, index: int) -> list[Schema]:
    """Return the schemas of an item of an array."""
    prefix = _get_prefix(schema)
    if index < len(prefix):
        return _select_schemas([prefix[index]])
    return _select_schemas([schema.get("items"), schema.get("additionalItems")])


def _select_schemas(values: Iterable[Any]) -> list[Schema]:
    """Leave out `true`, `false` and what is no schema: they add no constraint."""
    return [value for value in values if isinstance(value, dict)]


def _shorten(number: int | Decimal) -> str:
    return str(number) if number < 10**12 else f"{Decimal(number):.1e}"
