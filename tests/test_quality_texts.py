"""tools/quality_texts.py measures what `measure_divergence` does, in runs that may end early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import quality_texts
from kvant.checkpoints import load
from kvant.eval.evaluation import split_text
from kvant.probing import measure_divergence
from texts import TEXTS, load_text

CONTEXT, TOKENS, FORMATS = 160, 300, ("affine8,tail=0", "turbo2v2,tail=0")
NUM_READS = 2 * len(TEXTS) * len(FORMATS)  # of two pieces each, by one format at a time


def test_ended_runs_go_on_to_the_rows_of_each_format_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quality_texts, "TOKENS", TOKENS)
    monkeypatch.setattr(quality_texts, "CONTEXTS", (CONTEXT,))
    monkeypatch.setattr(quality_texts, "SPECS", {CONTEXT: FORMATS})
    monkeypatch.setattr(quality_texts, "FORMATS_AT_ONCE", 1)
    read_piece, count, output = quality_texts.read_piece, 0, tmp_path / "rows.json"

    def count_piece(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return read_piece(*args)

    def run(minutes: float) -> str:
        quality_texts.main(minutes, "built-in", tmp_path, output, None)
        return capsys.readouterr().out

    monkeypatch.setattr(quality_texts, "read_piece", count_piece)
    assert "pieces are left" in run(0) and count == 0
    with pytest.raises(KeyboardInterrupt):
        run(60)
    assert "all is measured" in run(60) and count == NUM_READS + 1
    assert "all is measured" in run(60) and count == NUM_READS + 1
    monkeypatch.setattr(quality_texts, "version", lambda package: "another")
    assert "all is measured" in run(60) and count == 2 * NUM_READS + 1
    measured = json.loads(output.read_text())["rows"]
    rows = {(row["text"], row["format"]): row for row in measured}
    assert len(measured) == len(TEXTS) * len(FORMATS)  # rows of the other version are replaced
    assert rows.keys() == {(text, name) for text in TEXTS for name in FORMATS}
    model, tokenizer = load(None, device="cpu", dtype="float32")
    text = split_text(tokenizer, load_text("code"), CONTEXT, TOKENS)
    for name in FORMATS:
        assert rows["code", name]["mean_kl"] == measure_divergence(model, text.pieces, name).mean_kl
    assert rows["code", FORMATS[0]]["mean_kl"] < rows["code", FORMATS[1]]["mean_kl"]
    assert rows["code", FORMATS[0]]["bits"] > rows["code", FORMATS[1]]["bits"] > 2


def test_unknown_model_and_missing_llama_cpp_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="--model other: one of built-in, smollm2, or all"):
        quality_texts.main(0, "other", tmp_path, tmp_path / "rows.json", None)
    monkeypatch.setattr(quality_texts, "find_spec", lambda name: None)
    monkeypatch.setattr(quality_texts, "MODELS", {"smollm2": None})  # the built-in one is at hand
    quality_texts.main(0, "smollm2", tmp_path, tmp_path / "rows.json", None)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == quality_texts.NO_LLAMA and last.endswith(f"run it again; {first}")
