"""Test that schemas which llguidance cannot bound are refused before it compiles them."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from kvant import Grammar, GrammarError, checkpoints
from kvant.generation.grammar import make_matcher
from kvant.generation.schema_limits import check_schemas

pytest.importorskip("llguidance", reason="pip install 'kvant[grammar]'")

Schema = dict[str, Any]


def pattern(text: str) -> Schema:
    return {"type": "string", "pattern": text}


HARD = [pattern(f"(a|b)*a(a|b){{{count}}}") for count in range(5, 25)]
LATE = [pattern(f"^(z|x{{10}}(a|b)*a(a|b){{{count}}})$") for count in range(5, 19)]
WIDE = [
    pattern("|".join(f"[a{chr(98 + (7 * n + k) % 24)}]{n}" for n in range(1000))) for k in (1, 2)
]


def double(key: str) -> Schema:
    """Return a schema that refers to itself twice at each of 22 levels: 4 million patterns."""
    return {
        "$defs": {
            f"d{level}": {key: [{"$ref": f"#/$defs/d{level + 1}"}] * 2} for level in range(22)
        }
        | {"d22": HARD[0]},
        "$ref": "#/$defs/d0",
    }


def chain(num_levels: int) -> Schema:
    """Return a chain of references; the stack of the process overflowed at 1,000."""
    definitions = {
        f"d{level}": {"properties": {"a": {"$ref": f"#/$defs/d{level + 1}"}}}
        for level in range(num_levels)
    }
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def of_properties(schemas: list[Schema]) -> Schema:
    """Let all schemas apply to the property `a`, by each of the ways that a schema has."""
    first, second, third, *rest = schemas
    parts = [
        {"type": "object", "properties": {"a": first}},
        {"type": "object", "additionalProperties": second},
        {"type": "object", "patternProperties": {"^a": third}},
        {"anyOf": [{"type": "object", "properties": {"a": {"allOf": rest}}}, {"type": "null"}]},
    ]
    return {"allOf": parts}


STRINGS = "constraints together.*at most 100000 are allowed"
HOSTILE: dict[str, tuple[Schema, str]] = {
    "patterns": ({"allOf": HARD}, "20 of one string.*1.1e.12, at most 100000 are allowed"),
    "hard only while decoding": ({"allOf": LATE}, STRINGS),
    "nested": (functools.reduce(lambda inner, part: {"allOf": [part, inner]}, HARD), STRINGS),
    "siblings": (functools.reduce(lambda inner, part: {**part, "anyOf": [inner]}, HARD), STRINGS),
    "references": (
        {"$defs": {"a": {"allOf": HARD[:10]}}, "allOf": [{"$ref": "#/$defs/a"}, *HARD[10:]]},
        STRINGS,
    ),
    "properties": (of_properties(HARD), STRINGS),
    "items": ({"allOf": [{"prefixItems": HARD[:1]}, {"items": {"allOf": HARD[1:]}}]}, STRINGS),
    "long patterns": ({"allOf": WIDE}, "2 of one string"),
    "pattern, format and length": (
        {**pattern("[ab]c|" * 9000), "format": "uri", "maxLength": 90},
        "3 of one string",
    ),
    "patterns by values": (
        {"allOf": [{"anyOf": HARD[:15]}, {"enum": [f"ab{n}" for n in range(3000)]}]},
        STRINGS,
    ),
    "alternatives": ({"allOf": [{"anyOf": HARD}] * 6}, "combinations of allOf"),
    "doubled": (double("allOf"), "at most 64 are allowed"),
    "doubled unions": (double("anyOf"), "combinations of allOf"),
    "remainders": ({"type": "integer", "multipleOf": 1000003}, "multipleOf 1000003.*at most"),
    "fractions": ({"type": "number", "multipleOf": 12345678.9}, "multipleOf 12345678.9"),
    "multiples": (
        {"allOf": [{"type": "integer", "multipleOf": n} for n in (7001, 1101)]},
        "multipleOf 7001 and 1101",
    ),
    "multiples of a union": (
        {"anyOf": [{"type": "integer", "multipleOf": n} for n in range(2003, 2083, 2)]},
        "multipleOf 2003 and 2005.*remainders",
    ),
    "pattern properties": (
        {"patternProperties": {f"^x{n}a*b": {} for n in range(100, 165)}},
        "65 of one object.*at most 4096 are allowed",
    ),
    "huge multiples": ({"multipleOf": 10**40, "anyOf": [{"multipleOf": 1e300}]}, "multipleOf 1"),
    "far index": ({"$ref": "#/anyOf/" + "9" * 5000, "anyOf": HARD, "allOf": HARD}, STRINGS),
    "levels": (chain(1000), "levels or more.*at most 500 are allowed"),
    "many names of a large part": (
        {
            "$defs": {
                "a": functools.reduce(lambda inner, _: {"allOf": [inner, {}]}, range(400), {})
            },
            "anyOf": [{"$ref": "#/$defs/a" + "/allOf/0" * n} for n in range(400)],
        },
        "levels or more|name more than",
    ),
    "named references": (
        {"$defs": {"a": {"$anchor": "x"}}, "$ref": "#x"},
        "'#x': only a path in the same schema",
    ),
    "moved references": ({"items": {"$id": "x", "$ref": "#/$defs/a"}}, "inner .id"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_unbounded_schema_is_refused(name: str) -> None:
    schema, message = HOSTILE[name]
    with pytest.raises(GrammarError, match=message):
        check_schemas([schema])


def test_schemas_of_a_grammar_are_counted_together() -> None:
    schemas = [{"properties": {"x": {"multipleOf": 9973 - 2 * n}}} for n in range(3)]
    check_schemas(schemas[:2])
    with pytest.raises(GrammarError, match=r"multipleOf 9969: .* 29913 remainders"):
        check_schemas(schemas)


@pytest.mark.parametrize(
    "grammar",
    [Grammar.json({"allOf": HARD}), Grammar.calls({"f": {"properties": {"x": {"allOf": HARD}}}})],
    ids=["json", "calls"],
)
def test_refusal_comes_before_compiling(grammar: Grammar) -> None:
    """No tokenizer is read: llguidance has not begun."""
    with pytest.raises(GrammarError, match="20 of one string"):
        make_matcher(grammar, None, frozenset({0}))


NODE = {
    "$defs": {
        "Base": {"type": "object", "properties": {"name": pattern("^[A-Z][a-z]+$")}},
        "Node": {
            "allOf": [
                {"$ref": "#/$defs/Base"},
                {"properties": {"next": {"$ref": "#/$defs/Node"}, "all": {"$ref": "#/$defs/All"}}},
            ]
        },
        "All": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
    },
    "$ref": "#/$defs/Node",
}
PASSWORD = {
    "type": "string",
    "minLength": 8,
    "allOf": [pattern(text) for text in ("[a-z]", "[A-Z]", "[0-9]", "[^a-zA-Z0-9]")],
}
TOOL = {
    "type": "object",
    "properties": {
        "country": {"enum": [f"country {n}" for n in range(250)]},
        "site": {"type": "string", "format": "uri", "pattern": "^https://", "maxLength": 200},
        "code": {"anyOf": [pattern("^[A-Z]{3}-[0-9]{4}$") | {"maxLength": 8}, {"type": "null"}]},
        "price": {"type": "number", "multipleOf": 0.01, "minimum": 0},
        "seconds": {"type": "integer", "multipleOf": 3600},
        "minutes": {"type": "integer", "multipleOf": 49},
        "any": {
            "anyOf": [{"$ref": "#/properties/country"}, {"$ref": "#/properties/code"}],
            "discriminator": {"propertyName": "id", "mapping": {"id": "#/properties/code"}},
        },
        "$id": {"type": "string"},
        "pattern": {"type": "string", "minLength": 1, "maxLength": 10_000},
    },
    "anyOf": [{"properties": {"city": {"enum": [f"c{n}" for n in range(300)]}}} for _ in range(5)],
    "required": ["country"],
}


@pytest.mark.parametrize(
    "schema",
    [
        NODE,
        PASSWORD,
        TOOL,
        {"enum": [f"value {n}" for n in range(2000)]},
        {"oneOf": [{"const": f"value {n}"} for n in range(500)]},
        {"type": "object", "properties": {f"p{n}": pattern(f"^{n}") for n in range(900)}},
        {"anyOf": [pattern(f"^(a|b)*a{{{n}}}$") for n in range(500)]},
        {"type": "object", "patternProperties": {f"^{n}_": {} for n in range(30)}},
        {"type": "array", "items": pattern("(a|b)*a(a|b){500}"), "maxItems": 10**6},
        functools.reduce(lambda s, _: {"type": "array", "items": s}, range(100), HARD[0]),
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_schemas_of_real_clients_compile(schema: Schema) -> None:
    _, tokenizer = checkpoints.load(None)
    matcher = make_matcher(Grammar.json(schema), tokenizer, frozenset({0}))
    assert matcher is not None and matcher.compute_token_mask([], 4096).any()
