"""Exams of tools/recall_exams.py keep their length; answers are found in both ways, or lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
import result_log
from kvant.checkpoints import load
from kvant.recipes import CacheSpec
from recall import WAYS, ExamReader, list_ways, summarize
from recall_exams import ITEMS_OF_KIND, KINDS, make_exam
from result_log import ResultLog

TEXT = "import os\n\n\ndef listed(path):\n    pass\n" * 90


@pytest.fixture(scope="module")
def model_and_tokenizer() -> tuple[Any, Any]:
    return load(None, device="cpu", dtype="float32")


def find_part(text: list[int], part: list[int]) -> int:
    """Return how often `part` is in a text."""
    return sum(text[at : at + len(part)] == part for at in range(len(text)))


def test_exam_has_its_length_and_its_lines_once(model_and_tokenizer: tuple[Any, Any]) -> None:
    _, tokenizer = model_and_tokenizer
    exam = make_exam(tokenizer, torch.arange(1000)[None], 3)
    assert len(exam.prompt) + max(len(item.tokens) for item in exam.items) == 1000
    assert Counter(item.kind for item in exam.items) == dict.fromkeys(KINDS, ITEMS_OF_KIND)
    for item in exam.items:
        assert all(find_part(exam.prompt, line) == 1 for line in item.lines)
        assert len(item.tokens) == len(item.is_answer)
    hops = next(item for item in exam.items if item.kind == "multihop")
    assert tokenizer.decode(hops.turns[0].answer) in tokenizer.decode(hops.turns[1].question)
    assert make_exam(tokenizer, torch.arange(1000)[None], 3) == exam


def test_short_exam_is_refused(model_and_tokenizer: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="an exam of 100 tokens has no room for 20 lines"):
        make_exam(model_and_tokenizer[1], torch.arange(100)[None], 0)


def test_answers_by_format(model_and_tokenizer: tuple[Any, Any]) -> None:
    """A window loses what raw recalls, and a question is answered equally in both ways."""
    reader = ExamReader(*model_and_tokenizer, TEXT, [800])
    rows = {
        name: reader.measure({"context": 800, "exam": 0, "format": name})
        for name in ("raw", "raw,window=64,sinks=0", "raw,select=64:0", "raw,prune=keydiff:700")
    }
    raw, lost, selected, pruned = rows.values()
    assert [*raw] == [*lost] == ["decoded"]
    assert raw["decoded"]["copy"]["correct"] > 0 == lost["decoded"]["copy"]["correct"]
    assert [*selected] == [*pruned] == [*WAYS]
    for way in WAYS:  # all pages are selected
        for kind in KINDS:
            assert selected[way][kind]["logprob"] == pytest.approx(
                raw["decoded"][kind]["logprob"], abs=0.01
            )


def test_exams_have_pieces_of_their_own(
    model_and_tokenizer: tuple[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    reader = ExamReader(*model_and_tokenizer, TEXT, [200])
    num_pieces = reader.count_exams(200, 1000)
    assert f"exams of 200 tokens: {num_pieces}, not 1000" in capsys.readouterr().out
    assert reader.count_exams(200, 2) == 2 < num_pieces
    with pytest.raises(ValueError, match=r"a context of 2048 tokens: the text has \d+, give fewer"):
        ExamReader(*model_and_tokenizer, TEXT[:400], [2048])


def test_context_beyond_the_model_is_refused(model_and_tokenizer: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="a context of 4096 tokens: the model has 2048"):
        ExamReader(*model_and_tokenizer, TEXT, [1024, 4096])


def test_ways_of_a_spec() -> None:
    def parse(text: str) -> CacheSpec:
        return kvant.parse(text, 2)

    assert list_ways(parse("affine4,window=64")) == ("decoded",)
    assert list_ways(parse("affine4,select=8:0")) == list_ways(parse("raw,prune=tova:64")) == WAYS


def test_summary_averages_answers() -> None:
    kinds = {kind: {"correct": 2, "logprob": -4.0} for kind in KINDS}
    rows = [{"context": 64, "exam": n, "format": "raw", "decoded": kinds} for n in range(2)]
    (line,) = summarize(rows)
    assert (line["question"], line["exams"], line["copy"]) == ("decoded", 2, 0.5)
    assert line["copy, nats"] == -1.0


def test_log_records_another_machine_and_replaces_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, machine = tmp_path / "folder" / "log.json", {"processor": "one", "cores": 2}
    monkeypatch.setattr(result_log, "describe_machine", lambda: machine)
    log = ResultLog.open(file, {})
    for number in range(2):
        log.record({"exam": number}, {"value": 1})
    machine = {"processor": "two", "cores": 2}
    log = ResultLog.open(file, {})
    log.record({"exam": 0}, {"value": 2})
    log = ResultLog.open(file, {})
    assert log.machine == {"processor": "one", "cores": 2}
    assert log.rows == [
        {"exam": 0, "value": 2, "machine": {"processor": "two"}},
        {"exam": 1, "value": 1},
    ]


def test_log_continues_and_refuses_other_settings(tmp_path: Path) -> None:
    file, keys = tmp_path / "log.json", [{"context": 1}, {"context": 2}]
    log = ResultLog.open(file, {"model": "one"})
    assert not log.measure(keys, lambda key: {}, minutes=0)
    assert log.measure(keys[:1], lambda key: {"value": 3}, minutes=1)
    log = ResultLog.open(file, {"model": "one"})
    assert log.measure(keys, lambda key: {"value": 5}, minutes=1)
    assert ResultLog.open(file, {"model": "one"}).rows == [
        {"context": 1, "value": 3},
        {"context": 2, "value": 5},
    ]
    with pytest.raises(ValueError, match="its rows have model one, not two: name another --output"):
        ResultLog.open(file, {"model": "two"})
