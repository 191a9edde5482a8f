"""`kvant formats`: every word of the language, and what one spec means."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvant import Shape, plan
from kvant.spec import parse
from kvant.spec.formats import FAMILY_WIDTHS, SIDE_FORMATS
from kvant.spec.options import OPTION_PARSERS as KNOWN
from kvant.spec.word_list import FORMAT_WORDS, OPTION_WORDS


def test_all_formats_and_options_are_listed(call: Any) -> None:
    code, out, error = call("formats")
    assert (code, error) == (0, "")
    for one in (*FORMAT_WORDS, *OPTION_WORDS):
        assert one.word in out and one.meaning in out
    families = {one.word.rstrip("0123456789v") for one in FORMAT_WORDS}
    assert (
        families >= {*FAMILY_WIDTHS, "raw", "fp"}
        and {"bf16", "q8_0", "q4_0"} <= SIDE_FORMATS.keys()
    )
    assert {one.word.partition("=")[0] for one in OPTION_WORDS} == KNOWN.keys()


@pytest.mark.parametrize("word", [one.word for one in FORMAT_WORDS])
def test_bytes_are_those_of_a_plan(word: str, call: Any) -> None:
    listed = {one["format"]: one for one in json.loads(call("formats", "--json")[1])["formats"]}
    planned = plan(Shape(1, 8, 128, 128), word)
    assert listed[word]["nbytes_per_token"] == planned.nbytes_per_token
    explained = json.loads(call("formats", word, "--json")[1])
    assert explained["nbytes_per_token"] == planned.nbytes_per_token


def test_a_spec_is_explained(call: Any) -> None:
    code, out, _ = call("formats", "affine8/turbo3,window=4096,sinks=4")
    assert code == 0
    assert "keys affine8 " in out and "values turbo3 " in out
    assert "the last 4096 tokens stay" in out and "the first 4 tokens stay" in out
    spec = "affine4,window=100"
    told = json.loads(call("formats", spec, "--json")[1])
    for one in told["lengths"]:
        assert one["nbytes"] == plan(Shape(1, 8, 128, 128), spec, context=one["tokens"]).nbytes


def test_a_prune_and_an_edge_are_in_the_figures(call: Any) -> None:
    pruned = json.loads(call("formats", "affine8,prune=keydiff:25%", "--json")[1])["lengths"]
    for one in pruned:
        planned = plan(Shape(1, 8, 128, 128), "affine8,prune=keydiff:25%", context=one["tokens"])
        assert one["nbytes_kept"] == planned.nbytes_kept < one["nbytes"]
    assert "once a prompt is read" in call("formats", "affine8,prune=keydiff:25%")[1]
    inner, plain = (
        json.loads(call("formats", spec, "--json")[1])["lengths"]
        for spec in ("affine4,edge=1:raw", "affine4")
    )
    assert inner == plain
    assert "first and last layers are not in" in call("formats", "affine4,edge=1:raw")[1]


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        ("auto:1GiB", "the smallest spec that stays within limits"),
        ("f16", "raw in that dtype"),
        ("aura3", "3 bits of a codebook"),
        ("affine5v2", "2 bits"),
        ("affine8,select=12%", "a token reads the first sealed page"),
    ],
)
def test_what_has_no_line_of_its_own_is_explained_too(spec: str, what: str, call: Any) -> None:
    code, out, _ = call("formats", spec)
    assert code == 0 and what in out
    if not spec.startswith("auto"):
        parse(spec, 2)


def test_a_capacity_ends_the_lengths(call: Any) -> None:
    told = json.loads(call("formats", "affine8,capacity=2048", "--json")[1])
    assert [one["tokens"] for one in told["lengths"]] == [1024, 2048]
    assert call("formats", "affine8,capacity=100")[0] == 0


def test_a_mistake_is_one_line(call: Any) -> None:
    code, out, error = call("formats", "afine4")
    assert (code, out, error.count("\n")) == (2, "", 1) and "nearest: affine4" in error
