"""Replies that follow a grammar: whatever the model would rather say."""

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
def inside() -> tuple[Any, Any]:
    return checkpoints.load(None)


def said(inside: tuple[Any, Any], grammar: Grammar | None, **options: Any) -> list[kvant.Step]:
    return list(
        kvant.generate(*inside, PROMPT, grammar=grammar, **{"max_new_tokens": 200} | options)
    )


def text(steps: list[kvant.Step]) -> str:
    return "".join(step.text for step in steps)


def is_city(told: str) -> bool:
    found = json.loads(told)
    return (
        list(found) == ["name", "people", "rivers"]
        and found["name"] in ("Rome", "Oslo")
        and 0 <= found["people"] <= 9999
        and set(found["rivers"]) <= {"Tiber", "Aker"}
        and len(found["rivers"]) <= 2
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_what_is_said_fits_the_schema(inside: tuple[Any, Any], temperature: float) -> None:
    for seed in range(4):
        steps = said(inside, Grammar.json(CITY), temperature=temperature, seed=seed)
        assert is_city(text(steps)) and steps[-1].finish_reason == "stop"


def test_without_a_grammar_it_does_not(inside: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError):
        json.loads(text(said(inside, None)))


def test_any_object_is_one(inside: tuple[Any, Any]) -> None:
    """However it is cut short: it was one as far as it came."""
    told = text(said(inside, Grammar.json(), temperature=1.0, seed=3, max_new_tokens=30))
    assert told.startswith("{")


def test_a_regular_expression_is_matched_as_a_whole(inside: tuple[Any, Any]) -> None:
    told = text(said(inside, Grammar.regex(r"[ab]{3}-\d{2}"), temperature=2.0, seed=1))
    assert re.fullmatch(r"[ab]{3}-\d{2}", told)


def test_a_grammar_of_lark(inside: tuple[Any, Any]) -> None:
    told = text(said(inside, Grammar.lark('start: "yes" | "no"')))
    assert told in ("yes", "no")


@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_drafts_change_nothing(inside: tuple[Any, Any], draft: Any) -> None:
    """Guesses may be outside of the grammar, or of another text that follows it."""
    names = {"type": "array", "items": {"enum": ["os.path", "path"]}, "minItems": 8, "maxItems": 8}
    alone = said(inside, Grammar.json(names), kv_cache="affine4")
    guesser = inside[0] if draft == "model" else draft
    drafted = said(inside, Grammar.json(names), draft=guesser, kv_cache="affine4")
    assert [step.token for step in alone] == [step.token for step in drafted]
    assert any(step.drafted for step in drafted)


def test_logprobs_are_of_what_could_be_said(inside: tuple[Any, Any]) -> None:
    """Where one token can stand it is certain."""
    steps = said(inside, Grammar.lark('start: "(" /[0-9]/ ")"'), temperature=1.0)
    assert [round(step.logprob, 6) == 0 for step in steps] == [True, False, True, True]


def test_an_engine_keeps_grammars_apart(inside: tuple[Any, Any]) -> None:
    free = text(said(inside, None, max_new_tokens=20, kv_cache="affine8"))
    wanted = [Grammar.json(CITY), None, Grammar.regex("[xy]{5}"), Grammar.json(CITY), None]
    with kvant.Engine(*inside, "affine8") as engine:
        streams = [
            engine.submit(PROMPT, grammar=one, max_new_tokens=200 if one else 20, seed=number)
            for number, one in enumerate(wanted)
        ]
        two = engine.submit(
            PROMPT, grammar=Grammar.json(CITY), n=3, temperature=1.5, max_new_tokens=200
        )
        found = [stream.result().text for stream in streams]
        assert all(is_city(one.text) for one in two.results())
    assert is_city(found[0]) and found[0] == found[3]
    assert found[1] == found[4] == free
    assert re.fullmatch("[xy]{5}", found[2])


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (lambda: Grammar.json({"type": "objec"}), "objec"),
        (lambda: Grammar.json({"not": {}}), "not"),
        (lambda: Grammar.json({"$ref": "http://localhost/x"}), "not present"),
        (lambda: Grammar.regex("(?=a)"), "look-around"),
        (lambda: Grammar.lark("start: nothing"), "nothing"),
    ],
)
def test_what_is_no_grammar_is_refused(inside: tuple[Any, Any], grammar: Any, why: str) -> None:
    with pytest.raises(GrammarError, match=why):
        said(inside, grammar())


def test_a_reply_that_cannot_end_is_refused(inside: tuple[Any, Any]) -> None:
    with pytest.raises(GrammarError, match="ends a reply"):
        said(inside, Grammar.json(), ignore_end=True)


def test_a_slow_tokenizer_is_refused(inside: tuple[Any, Any]) -> None:
    class Slow:
        def encode(self, text: str) -> list[int]:
            return [1]

    with pytest.raises(GrammarError, match="Slow: a fast tokenizer"):
        list(kvant.generate(inside[0], Slow(), "a", grammar=Grammar.json()))
