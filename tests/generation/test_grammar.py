"""Test replies under a grammar, whatever the model prefers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import kvant
from kvant import Grammar, GrammarError, checkpoints

pytest.importorskip("llguidance", reason="pip install 'kvant[grammar]'")

CITY = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Rome", "Oslo"]},
        "people": {"type": "integer", "minimum": 0, "maximum": 9999},
        "rivers": {"type": "array", "items": {"enum": ["Tiber", "Aker"]}, "maxItems": 2},
    },
    "required": ["name", "people", "rivers"],
    "additionalProperties": False,
}
PROMPT = "import os\n\ndef read(path):\n"


@pytest.fixture(scope="module")
def bundled_model() -> tuple[Any, Any]:
    return checkpoints.load(None)


def generate_steps(
    bundled_model: tuple[Any, Any], grammar: Grammar | None, **options: Any
) -> list[kvant.Step]:
    return list(
        kvant.generate(*bundled_model, PROMPT, grammar=grammar, **{"max_new_tokens": 200} | options)
    )


def join_text(steps: list[kvant.Step]) -> str:
    return "".join(step.text for step in steps)


def is_city(reply: str) -> bool:
    value = json.loads(reply)
    return (
        list(value) == ["name", "people", "rivers"]
        and value["name"] in ("Rome", "Oslo")
        and 0 <= value["people"] <= 9999
        and set(value["rivers"]) <= {"Tiber", "Aker"}
        and len(value["rivers"]) <= 2
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_output_matches_the_schema(bundled_model: tuple[Any, Any], temperature: float) -> None:
    for seed in range(4):
        steps = generate_steps(
            bundled_model, Grammar.json(CITY), temperature=temperature, seed=seed
        )
        assert is_city(join_text(steps)) and steps[-1].finish_reason == "stop"


def test_output_without_a_grammar_does_not_match(bundled_model: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError):
        json.loads(join_text(generate_steps(bundled_model, None)))


def test_any_json_object_is_accepted(bundled_model: tuple[Any, Any]) -> None:
    """However short the reply is cut, its prefix is valid."""
    reply = join_text(
        generate_steps(bundled_model, Grammar.json(), temperature=1.0, seed=3, max_new_tokens=30)
    )
    assert reply.startswith("{")


def test_regular_expression_matches_the_whole_output(bundled_model: tuple[Any, Any]) -> None:
    reply = join_text(
        generate_steps(bundled_model, Grammar.regex(r"[ab]{3}-\d{2}"), temperature=2.0, seed=1)
    )
    assert re.fullmatch(r"[ab]{3}-\d{2}", reply)


def test_lark_grammar_is_followed(bundled_model: tuple[Any, Any]) -> None:
    reply = join_text(generate_steps(bundled_model, Grammar.lark('start: "yes" | "no"')))
    assert reply in ("yes", "no")


@pytest.mark.usefixtures("every_draft_is_verified")
@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_drafts_change_nothing(bundled_model: tuple[Any, Any], draft: Any) -> None:
    """Drafts may violate the grammar, or contain another text that it allows."""
    names = {"type": "array", "items": {"enum": ["os.path", "path"]}, "minItems": 8, "maxItems": 8}
    single = generate_steps(bundled_model, Grammar.json(names), kv_cache="affine4")
    guesser = bundled_model[0] if draft == "model" else draft
    drafted = generate_steps(bundled_model, Grammar.json(names), draft=guesser, kv_cache="affine4")
    assert [step.token for step in single] == [step.token for step in drafted]
    assert any(step.drafted for step in drafted)


def test_logprobs_are_over_allowed_tokens(bundled_model: tuple[Any, Any]) -> None:
    """If only one token is allowed, its probability is 1."""
    steps = generate_steps(bundled_model, Grammar.lark('start: "(" /[0-9]/ ")"'), temperature=1.0)
    assert [round(step.logprob, 6) == 0 for step in steps] == [True, False, True, True]


def test_engine_keeps_grammars_separate(bundled_model: tuple[Any, Any]) -> None:
    free = join_text(generate_steps(bundled_model, None, max_new_tokens=20, kv_cache="affine8"))
    wanted = [Grammar.json(CITY), None, Grammar.regex("[xy]{5}"), Grammar.json(CITY), None]
    with kvant.Engine(*bundled_model, "affine8") as engine:
        streams = [
            engine.submit(PROMPT, grammar=schema, max_new_tokens=200 if schema else 20, seed=number)
            for number, schema in enumerate(wanted)
        ]
        two = engine.submit(
            PROMPT, grammar=Grammar.json(CITY), n=3, temperature=1.5, max_new_tokens=200
        )
        texts = [stream.result().text for stream in streams]
        assert all(is_city(schema.text) for schema in two.results())
    assert is_city(texts[0]) and texts[0] == texts[3]
    assert texts[1] == texts[4] == free
    assert re.fullmatch("[xy]{5}", texts[2])


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (lambda: Grammar.json({"type": "objec"}), "objec"),
        (lambda: Grammar.json({"not": {}}), "not"),
        (lambda: Grammar.json({"$ref": "http://localhost/x"}), "only a path in the same schema"),
        (lambda: Grammar.regex("(?=a)"), "look-around"),
        (lambda: Grammar.lark("start: nothing"), "nothing"),
    ],
)
def test_invalid_grammar_is_refused(
    bundled_model: tuple[Any, Any], grammar: Any, message: str
) -> None:
    with pytest.raises(GrammarError, match=message):
        generate_steps(bundled_model, grammar())


def test_grammar_without_an_end_is_refused(bundled_model: tuple[Any, Any]) -> None:
    with pytest.raises(GrammarError, match="needs an end token"):
        generate_steps(bundled_model, Grammar.json(), ignore_end=True)


def test_a_slow_tokenizer_is_refused(bundled_model: tuple[Any, Any]) -> None:
    class Slow:
        def encode(self, text: str) -> list[int]:
            return [1]

    with pytest.raises(GrammarError, match="Slow: a fast tokenizer"):
        list(kvant.generate(bundled_model[0], Slow(), "a", grammar=Grammar.json()))
