"""Test `kvant formats`: every word of the spec language, and the meaning of one spec."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvant import Shape, plan
from kvant.spec import parse
from kvant.spec.formats import FAMILY_WIDTHS, FORMAT_WORDS, SIDE_FORMATS
from kvant.spec.options import OPTION_PARSERS as KNOWN
from kvant.spec.options import OPTION_WORDS


def test_all_formats_and_options_are_listed(call: Any) -> None:
    code, out, error = call("formats")
    assert (code, error) == (0, "")
    for word in (*FORMAT_WORDS, *OPTION_WORDS):
        assert word.word in out and word.meaning in out
    families = {word.word.rstrip("0123456789v") for word in FORMAT_WORDS}
    assert (
        families >= {*FAMILY_WIDTHS, "raw", "fp"}
        and {"bf16", "q8_0", "q4_0"} <= SIDE_FORMATS.keys()
    )
    assert {word.word.partition("=")[0] for word in OPTION_WORDS} == KNOWN.keys()


@pytest.mark.parametrize("word", [word.word for word in FORMAT_WORDS])
def test_bytes_equal_those_of_a_plan(word: str, call: Any) -> None:
    listed = {load["format"]: load for load in json.loads(call("formats", "--json")[1])["formats"]}
    planned = plan(Shape(1, 8, 128, 128), word)
    assert listed[word]["nbytes_per_token"] == planned.nbytes_per_token
    explained = json.loads(call("formats", word, "--json")[1])
    assert explained["nbytes_per_token"] == planned.nbytes_per_token


def test_a_spec_is_explained(call: Any) -> None:
    code, out, _ = call("formats", "affine8/turbo3,window=4096,sinks=4")
    assert code == 0
    assert "keys affine8 " in out and "values turbo3 " in out
    assert "keeps the last 4096 tokens" in out and "keeps the first 4 tokens" in out
    spec = "affine4,window=100"
    report = json.loads(call("formats", spec, "--json")[1])
    for entry in report["lengths"]:
        assert entry["nbytes"] == plan(Shape(1, 8, 128, 128), spec, context=entry["tokens"]).nbytes


def test_prune_and_edge_options_change_the_figures(call: Any) -> None:
    pruned = json.loads(call("formats", "affine8,prune=keydiff:25%", "--json")[1])["lengths"]
    for entry in pruned:
        planned = plan(Shape(1, 8, 128, 128), "affine8,prune=keydiff:25%", context=entry["tokens"])
        assert entry["nbytes_kept"] == planned.nbytes_kept < entry["nbytes"]
    assert "after prefill" in call("formats", "affine8,prune=keydiff:25%")[1]
    inner, plain = (
        json.loads(call("formats", spec, "--json")[1])["lengths"]
        for spec in ("affine4,edge=1:raw", "affine4")
    )
    assert inner == plain
    assert "leaves out the first and last layers" in call("formats", "affine4,edge=1:raw")[1]


def test_layers_in_formats_of_their_own_are_explained(call: Any) -> None:
    spec = "turbo3,layers=0-1:affine8v4+5:raw,group=32"
    code, out, _ = call("formats", spec)
    assert code == 0
    for text in ("layers 0-1: keys affine8 ", "layers 0-1: values affine4 ", "layer 5: raw "):
        assert text in out
    assert "leaves out the layers in formats of their own" in out
    lengths = [json.loads(call("formats", s, "--json")[1])["lengths"] for s in (spec, "turbo3")]
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize(
    ("spec", "meaning"),
    [
        ("auto:1GiB", "the smallest format within loss limits"),
        ("f16", "raw in this dtype"),
        ("aura3", "3 bits of a codebook"),
        ("affine5v2", "2 bits"),
        ("affine8,select=12%", "each token reads the first sealed page"),
    ],
)
def test_formats_without_a_table_row_are_explained_too(spec: str, meaning: str, call: Any) -> None:
    code, out, _ = call("formats", spec)
    assert code == 0 and meaning in out
    if not spec.startswith("auto"):
        parse(spec, 2)


def test_options_count_in_the_bytes_of_a_spec(call: Any) -> None:
    """Regression: those of `group` and of the key bounds of `select` did not."""
    for spec in ("affine4,group=128", "affine4,select=8", "raw,select=8"):
        report = json.loads(call("formats", spec, "--json")[1])
        many = plan(Shape(8, 8, 128, 128), spec, context=8192)
        assert report["nbytes_per_token"] == many.row_nbytes[-1]
        nbytes = {entry["tokens"]: entry["nbytes"] for entry in report["lengths"]}
        assert nbytes[8192] == many.layer_nbytes[-1]
    assert json.loads(call("formats", "affine8,capacity=256", "--json")[1])["saves_from"] is None


def test_capacity_ends_the_list_of_lengths(call: Any) -> None:
    report = json.loads(call("formats", "affine8,capacity=2048", "--json")[1])
    assert [entry["tokens"] for entry in report["lengths"]] == [1024, 2048]
    assert call("formats", "affine8,capacity=100")[0] == 0


def test_user_error_is_one_line(call: Any) -> None:
    code, out, error = call("formats", "afine4")
    assert (code, out, error.count("\n")) == (2, "", 1) and "nearest: affine4" in error
