"""The model inside on a few tokens: what raw gives, what breaks is seen, and what is kept."""

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
    summarize_quality,
)
from kvant.generation.prefill import count_shared_prefix
from kvant.probing.divergence import Divergence, make_stored_prefill_spec

FEW = EvaluationSettings(tokens=700, context=350, prompts=1, continued=8)


@pytest.fixture(scope="module")
def inside() -> Any:
    return load(None)


@pytest.fixture(scope="module")
def found(inside: Any) -> list[EvaluationResult]:
    model, tokenizer = inside
    specs = {"raw": "raw", "four bits": make_stored_prefill_spec(model, "affine4")}
    return evaluate(model, tokenizer, specs, settings=FEW)


def test_raw_is_itself(found: list[EvaluationResult]) -> None:
    raw, _ = found
    assert (raw.mean_kl, raw.p999_kl, raw.perplexity_change, raw.top1) == (0, 0, 0, 1)
    assert raw.mean_kl_interval == raw.perplexity_change_interval == (0, 0)
    assert (raw.identical, raw.recall) == (8, raw.raw_recall)
    assert raw.row_nbytes == raw.raw_row_nbytes and raw.nbytes == raw.raw_nbytes


def test_recipes_may_have_a_name(inside: Any, found: list[EvaluationResult]) -> None:
    _, four = found
    assert (four.format, four.positions) == ("four bits", 698)
    assert 0 < four.mean_kl_interval[0] < four.mean_kl < four.mean_kl_interval[1] < 0.1
    assert four.p99_kl <= four.p999_kl and four.tokens_s > 0 and four.vs_raw > 0
    planned = plan(inside[0], "affine4", context=32768)
    assert (four.row_nbytes, four.nbytes["32k"]) == (planned.nbytes_per_token, planned.nbytes)


def test_a_format_whose_scales_are_fitted_can_be_measured(inside: Any) -> None:
    """What `auto` takes on a model with outliers was refused: "Smooth has no name"."""
    (smooth,) = evaluate(*inside, {"turbo4": "turbo4,smooth"}, settings=FEW)
    assert 0 < smooth.mean_kl < 0.1 and smooth.row_nbytes < 0.3 * smooth.raw_row_nbytes


def test_a_format_that_loses_rows_is_seen(inside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Affine.open
    monkeypatch.setattr(Affine, "open", lambda self, fields: opened(self, fields) * 0)
    monkeypatch.setattr(dispatch, "BACKENDS", [ReferenceBackend()])
    (broken,) = evaluate(*inside, {"affine8": "affine8,tail=0"}, settings=FEW)
    assert broken.perplexity_change_interval[0] > 0.1 and broken.mean_kl > 0.1
    assert broken.top1 < 0.9 and broken.identical < 8


def test_a_result_is_a_line_of_json_also_where_nothing_is_finite(
    found: list[EvaluationResult],
) -> None:
    for one in (*found, replace(found[0], mean_kl=math.inf, mean_kl_interval=(0.5, math.inf))):
        line = json.dumps(one.to_json(), allow_nan=False)
        assert EvaluationResult.from_json(json.loads(line)) == one
        assert flatten_result(one)["recall_copy"] == one.recall_shares["copy"]
        assert all(isinstance(v, str | int | float | None) for v in flatten_result(one).values())


def test_a_loss_beyond_all_numbers_is_infinite() -> None:
    many = torch.zeros(500)
    told = summarize_quality(Divergence(many + 900, many + 1, many + 900, many > 0), seed=0)
    assert told["perplexity_change"] == told["perplexity_change_interval"][1] == math.inf
    assert told["mean_kl_interval"] == (900, 900)


def test_a_capacity_has_no_bytes_beyond_it(inside: Any) -> None:
    (one,) = evaluate(*inside, {"a": "affine8,capacity=4096"}, settings=FEW)
    assert one.nbytes["2k"] is not None and one.nbytes["32k"] is None


def test_a_saved_result_is_not_measured_again(
    inside: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, steps = tmp_path / "found.jsonl", list[tuple[int, int]]()
    (first,) = evaluate(*inside, {"affine8": "affine8"}, settings=FEW, save=file)
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
        again = evaluate(
            *inside, names, settings=FEW, save=file, progress=lambda *step: steps.append(step)
        )
        assert again == [first, replace(first, format="affine4")]
    assert measured == ["affine4"]
    assert steps == [(done, 8) for done in range(1, 9)] * 2
    other = evaluate(*inside, {"affine8": "affine8,sinks=4"}, settings=FEW, save=file)
    assert other == [first] and measured[1:] == ["affine8"]  # the name alone says nothing


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"settings": replace(FEW, tokens=600)}, "holds results with text"),
        ({"settings": replace(FEW, seed=7)}, "holds results with seed 0, and this is 7"),
        ({"text": "import this\n" * 200}, "holds results with text"),
    ],
    ids=["tokens", "seed", "text"],
)
def test_results_of_something_else_are_refused(
    inside: Any, changes: Any, why: str, tmp_path: Path
) -> None:
    file = tmp_path / "found.jsonl"
    evaluate(*inside, {}, settings=FEW, save=file)
    before = file.read_text()
    with pytest.raises(ValueError, match=why):
        evaluate(*inside, {"raw": "raw"}, **{"settings": FEW} | changes, save=file)
    assert file.read_text() == before


def test_another_file_is_not_written_to(inside: Any, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(ValueError, match="no file of saved results"):
        evaluate(*inside, {"raw": "raw"}, settings=FEW, save=file)
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("formats", "settings", "why"),
    [
        ({"a": "affine9"}, FEW, "nearest: affine8"),
        ({"a": "raw"}, replace(FEW, continued=200), "continue by fewer"),
        ({"a": "raw"}, replace(FEW, tokens=100), "too short to plant"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    inside: Any, formats: Any, settings: EvaluationSettings, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        evaluate(*inside, formats, settings=settings)


def test_continuations_count_what_is_the_same() -> None:
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


def test_the_front_has_no_format_that_another_beats(
    found: list[EvaluationResult], tmp_path: Path
) -> None:
    sizes = {"a": (8, 0.1), "b": (4, 0.2), "c": (4, 0.3), "d": (6, 0.25), "e": (2, 0.9)}
    made = [replace(found[0], format=n, row_nbytes=x, mean_kl=y) for n, (x, y) in sizes.items()]
    points = [FormatPoint.from_result(one) for one in made]
    assert [one.name for one in find_pareto_front(points)] == ["e", "b", "a"]
    pytest.importorskip("matplotlib", reason="only pictures need it")
    plot_results(points, "title", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
