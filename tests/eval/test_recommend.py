"""Test `kvant.recommend` and its command on the bundled model."""

from __future__ import annotations

import json
from typing import Any

import pytest

import kvant
from kvant import checkpoints
from kvant.errors import SpecError
from kvant.eval.recommend import ComparedFormat, Recommendation, recommend

SPECS = ("raw", "affine8", "turbo4", "turbo2")


@pytest.fixture(scope="module")
def result() -> tuple[Recommendation, list[ComparedFormat]]:
    model, tokenizer = checkpoints.load(None)
    seen: list[ComparedFormat] = []
    return recommend(model, tokenizer, context=1024, specs=SPECS, on_format=seen.append), seen


def test_smallest_harmless_format_is_recommended(result: Any) -> None:
    recommendation, seen = result
    assert tuple(seen) == recommendation.formats
    assert [row.spec for row in seen] == list(SPECS)
    assert [row.is_harmless for row in seen] == [True, True, True, False]
    assert recommendation.spec == "turbo4" and recommendation.context == 1024
    nbytes = [row.nbytes for row in seen]
    assert nbytes == sorted(nbytes, reverse=True)
    assert nbytes[2] == kvant.plan(checkpoints.load_config(None), "turbo4", context=1024).nbytes


def test_rows_measure_predictions_recall_and_replies(result: Any) -> None:
    raw, affine8, _, turbo2 = result[1]
    assert (raw.mean_kl, raw.reply_kl, raw.lost) == (0, 0, 0)
    assert raw.top1 == raw.reply_same == raw.of_raw == 1
    assert 0 < affine8.reply_kl < 1e-3 < turbo2.reply_kl
    assert 0 < affine8.mean_kl < 1e-3 < turbo2.mean_kl
    assert turbo2.lost > 0.1 and turbo2.example is not None
    assert all(row.tokens_per_second > 0 for row in result[1])


def test_explanation_names_the_neighbours(result: Any) -> None:
    taken, larger, smaller = result[0].explain().splitlines()
    assert taken.startswith("take turbo4: ") and "at 1,024 tokens" in taken
    assert larger.startswith("affine8 is harmless too, and takes 1.")
    assert smaller.startswith("turbo2 changes predictions: ") and "raw continues" in smaller


def test_budget_excludes_formats_or_all_of_them(result: Any) -> None:
    model, tokenizer = checkpoints.load(None)
    raw = kvant.plan(model, "raw", context=1024).nbytes
    specs = ("raw", "affine8")
    small = recommend(model, tokenizer, context=1024, budget=raw - 1, specs=specs)
    assert small.spec == "affine8" and not small.formats[0].fits
    none = recommend(model, tokenizer, context=1024, budget=1000, specs=specs)
    assert none.spec is None
    assert "no harmless format fits 1000 B at 1,024 tokens: affine8 takes" in none.explain()


@pytest.mark.parametrize("context", [0, 2049])
def test_impossible_contexts_are_refused(context: int) -> None:
    with pytest.raises(ValueError, match=f"context={context}: 1 to 2048 tokens are possible"):
        recommend(*checkpoints.load(None), context=context)


def test_specs_begin_with_raw() -> None:
    with pytest.raises(SpecError, match="begin with 'raw'"):
        recommend(*checkpoints.load(None), specs=("affine8",))


@pytest.mark.parametrize("option", ["window=16", "capacity=2048"])
def test_specs_that_drop_rows_are_refused(option: str) -> None:
    """Regression: they were compared with all rows kept, and took the bytes of few."""
    with pytest.raises(SpecError, match="leave out window=, retain= and capacity="):
        recommend(*checkpoints.load(None), specs=("raw", f"affine8,{option}"))


def test_command_prints_rows_and_the_choice(call: Any) -> None:
    options = "--context", "1024", "--formats", ",".join(SPECS[1:])
    code, out, error = call("recommend", *options, "--budget", "2GiB")
    lines = out.splitlines()
    assert (code, error) == (0, "")
    assert lines[0].split() == [
        "format",
        "bytes",
        "of",
        "raw",
        "mean",
        "KL",
        "top-1",
        "recall",
        "lost",
        "reply",
        "same",
        "tokens/s",
    ]
    assert [line.split()[0] for line in lines[1:5]] == list(SPECS)
    assert lines[4].endswith("changes predictions")
    assert lines[-1] == "try it: kvant run --kv-cache turbo4"
    code, out, error = call("recommend", *options, "--json")
    fields = json.loads(out)
    assert fields["spec"] == "turbo4" and len(fields["formats"]) == 4
    assert fields["why"].startswith("take turbo4: ")


@pytest.mark.parametrize("words", [("--budget", "2 apples"), ("--formats", "affine9")])
def test_wrong_options_are_one_line(words: tuple[str, str], call: Any) -> None:
    code, out, error = call("recommend", *words)
    assert (code, out) == (2, "") and error.count("\n") == 1 and words[1] in error
