"""Test evaluation of the bundled model on a few tokens: raw, lossy formats and saved results."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf import zoo
from kvant import plan
from kvant.attention import dispatch
from kvant.attention.reference import ReferenceBackend
from kvant.checkpoints import load
from kvant.codecs.affine import Affine
from kvant.eval import EvaluationResult, EvaluationSettings, evaluate
from kvant.eval.evaluation import Evaluation, compare_continuations
from kvant.eval.result import (
    FormatPoint,
    find_pareto_front,
    flatten_result,
    plot_results,
    summarize_nbytes,
    summarize_quality,
)
from kvant.prefixes.tree import count_shared_prefix
from kvant.probing.divergence import Divergence, make_stored_prefill_spec

FEW = EvaluationSettings(tokens=700, context=350, prompts=1, continued=8)


@pytest.fixture(scope="module")
def bundled_model() -> Any:
    return load(None)


@pytest.fixture(scope="module")
def results(bundled_model: Any) -> list[EvaluationResult]:
    model, tokenizer = bundled_model
    specs = {"raw": "raw", "four bits": make_stored_prefill_spec(model, "affine4")}
    return evaluate(model, tokenizer, specs, settings=FEW)


def test_raw_equals_itself(results: list[EvaluationResult]) -> None:
    raw, _ = results
    assert (raw.mean_kl, raw.p999_kl, raw.perplexity_change, raw.top1) == (0, 0, 0, 1)
    assert raw.mean_kl_interval == raw.perplexity_change_interval == (0, 0)
    assert (raw.identical, raw.recall) == (8, raw.raw_recall)
    assert raw.row_nbytes == raw.raw_row_nbytes and raw.nbytes == raw.raw_nbytes


def test_recipes_may_be_named(bundled_model: Any, results: list[EvaluationResult]) -> None:
    _, four = results
    assert (four.format, four.positions) == ("four bits", 698)
    assert 0 < four.mean_kl_interval[0] < four.mean_kl < four.mean_kl_interval[1] < 0.1
    assert four.p99_kl <= four.p999_kl and four.tokens_s > 0 and four.vs_raw > 0
    planned = plan(bundled_model[0], "affine4", context=32768)
    assert (four.row_nbytes, four.nbytes["32k"]) == (planned.nbytes_per_token, planned.nbytes)


def test_a_window_does_not_change_the_bytes_of_a_row(bundled_model: Any) -> None:
    """Regression: rows of layers with a window counted as 0 bytes, and `--plot` divided by them."""
    model, _ = bundled_model
    nbytes, windowed = (
        summarize_nbytes(model, "affine8"),
        summarize_nbytes(model, "affine8,window=64"),
    )
    assert windowed["row_nbytes"] == nbytes["row_nbytes"] > 0
    narrow = summarize_nbytes(zoo.build("mistral"), "affine8")
    assert 0 < narrow["row_nbytes"] < narrow["raw_row_nbytes"]


def test_a_format_whose_scales_are_fitted_can_be_measured(bundled_model: Any) -> None:
    """Regression: the format that `auto` chose for a model with outliers was refused: "Smooth
    has no name".
    """
    (smooth,) = evaluate(*bundled_model, {"turbo4": "turbo4,smooth"}, settings=FEW)
    assert 0 < smooth.mean_kl < 0.1 and smooth.row_nbytes < 0.3 * smooth.raw_row_nbytes


def test_lossy_format_is_detected(bundled_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Affine.open
    monkeypatch.setattr(Affine, "open", lambda self, fields: opened(self, fields) * 0)
    monkeypatch.setattr(dispatch, "BACKENDS", [ReferenceBackend()])
    (broken,) = evaluate(*bundled_model, {"affine8": "affine8,tail=0"}, settings=FEW)
    assert broken.perplexity_change_interval[0] > 0.1 and broken.mean_kl > 0.1
    assert broken.top1 < 0.9 and broken.identical < 8


def test_result_is_one_json_line_even_if_nothing_is_finite(
    results: list[EvaluationResult],
) -> None:
    for result in (
        *results,
        replace(results[0], mean_kl=math.inf, mean_kl_interval=(0.5, math.inf)),
    ):
        line = json.dumps(result.to_json(), allow_nan=False)
        assert EvaluationResult.from_json(json.loads(line)) == result
        assert flatten_result(result)["recall_copy"] == result.recall_shares["copy"]
        assert all(isinstance(v, str | int | float | None) for v in flatten_result(result).values())


def test_overflowing_loss_is_infinite() -> None:
    many = torch.zeros(500)
    quality = summarize_quality(Divergence(many + 900, many + 1, many + 900, many > 0), seed=0)
    assert quality["perplexity_change"] == quality["perplexity_change_interval"][1] == math.inf
    assert quality["mean_kl_interval"] == (900, 900)


def test_capacity_allocates_no_bytes_beyond_it(bundled_model: Any) -> None:
    (result,) = evaluate(*bundled_model, {"a": "affine8,capacity=4096"}, settings=FEW)
    assert result.nbytes["2k"] is not None and result.nbytes["32k"] is None


def test_a_saved_result_is_not_measured_again(
    bundled_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, steps = tmp_path / "found.jsonl", list[tuple[int, int]]()
    (first,) = evaluate(*bundled_model, {"affine8": "affine8"}, settings=FEW, save=file)
    with file.open("a") as torn:
        torn.write('{"format": "affine4", "mean')
    measured: list[str] = []

    def result(self: Evaluation, name: str, spec: Any) -> EvaluationResult:
        measured.append(name)
        for _ in range(4):
            self.report_step()
        return replace(first, format=name)

    monkeypatch.setattr(Evaluation, "measure_format", result)
    names = {"affine8": "affine8", "affine4": "affine4"}
    for _ in range(2):
        second = evaluate(
            *bundled_model,
            names,
            settings=FEW,
            save=file,
            progress=lambda *step: steps.append(step),
        )
        assert second == [first, replace(first, format="affine4")]
    assert measured == ["affine4"]
    assert steps == [(done, 8) for done in range(1, 9)] * 2
    other = evaluate(*bundled_model, {"affine8": "affine8,sinks=4"}, settings=FEW, save=file)
    assert other == [first] and measured[1:] == ["affine8"]  # the name alone is not enough


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": replace(FEW, tokens=600)}, "holds results with text"),
        ({"settings": replace(FEW, seed=7)}, "holds results with seed 0, and this run has 7"),
        ({"text": "import this\n" * 200}, "holds results with text"),
    ],
    ids=["tokens", "seed", "text"],
)
def test_results_of_other_settings_are_refused(
    bundled_model: Any, changes: Any, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "found.jsonl"
    evaluate(*bundled_model, {}, settings=FEW, save=file)
    before = file.read_text()
    with pytest.raises(ValueError, match=message):
        evaluate(*bundled_model, {"raw": "raw"}, **{"settings": FEW} | changes, save=file)
    assert file.read_text() == before


@pytest.mark.parametrize("text", ["mine", "1\n2\n", '["eval"]\n'])
def test_unrelated_file_is_not_overwritten(bundled_model: Any, tmp_path: Path, text: str) -> None:
    file = tmp_path / "notes.txt"
    file.write_text(text)
    with pytest.raises(ValueError, match="not a file of saved results"):
        evaluate(*bundled_model, {"raw": "raw"}, settings=FEW, save=file)
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("formats", "settings", "message"),
    [
        ({"a": "affine9"}, FEW, "nearest: affine8"),
        ({"a": "raw"}, replace(FEW, continued=200), "continue by fewer"),
        ({"a": "raw"}, replace(FEW, tokens=100), "too short to plant"),
    ],
)
def test_invalid_arguments_are_refused(
    bundled_model: Any, formats: Any, settings: EvaluationSettings, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(*bundled_model, formats, settings=settings)


def test_continuations_count_matching_tokens() -> None:
    assert [
        count_shared_prefix([1, 2, 3], other) for other in ([1, 2, 3], [1, 9, 3], [9, 2, 3])
    ] == [
        3,
        1,
        0,
    ]
    model, ids = zoo.build("llama"), torch.randint(3, zoo.VOCABULARY, (1, 100))
    assert compare_continuations(model, [ids], "raw", 12).identical == 12
    assert compare_continuations(model, [ids, ids], "affine2,tail=0", 12).identical < 12


def test_pareto_front_has_no_dominated_format(
    results: list[EvaluationResult], tmp_path: Path
) -> None:
    sizes = {"a": (8, 0.1), "b": (4, 0.2), "c": (4, 0.3), "d": (6, 0.25), "e": (2, 0.9)}
    variants = [
        replace(results[0], format=n, row_nbytes=x, mean_kl=y) for n, (x, y) in sizes.items()
    ]
    points = [FormatPoint.from_result(variant) for variant in variants]
    assert [variant.name for variant in find_pareto_front(points)] == ["e", "b", "a"]
    pytest.importorskip("matplotlib", reason="only pictures need it")
    plot_results(points, "title", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
