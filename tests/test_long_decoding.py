"""tools/long_decoding.py generates the same tokens again, and finds raw equal to itself."""

from __future__ import annotations

from pathlib import Path

import pytest

import long_decoding
from kvant.checkpoints import load
from long_decoding import DecodingTest, summarize
from result_log import ResultLog
from texts import load_text


def test_formats_are_compared_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PROMPT": 64, "BLOCK": 32, "GREEDY": 4}.items():
        monkeypatch.setattr(long_decoding, name, value)
    log = ResultLog.open(tmp_path / "log.json", {"tokens": 64})
    model, tokenizer = load(None, device="cpu", dtype="float32")
    test = DecodingTest(model, tokenizer, {"code": load_text("code")}, log, 64)
    formats = ("raw", "raw,tail=0", "affine2,tail=0", "affine4,prune=keydiff:48")
    groups = [*test.list_groups(formats)]
    assert [[key["format"] for key in group] for group in groups] == [
        ["raw"],
        ["raw,tail=0", "affine2,tail=0"],
        ["affine4,prune=keydiff:48"],
    ]
    assert log.measure_groups(groups, test.measure, minutes=5)
    generated, same, lossy, pruned = log.rows
    assert len(generated["tokens"]) == 64 + 64
    assert test.measure(groups[0]) == [{"tokens": generated["tokens"]}]
    assert same["kl"] == [0, 0] and same["identical"] == [4, 4]
    for row in (lossy, pruned):
        assert len(row["kl"]) == 2 and min(row["kl"]) > 0
    (alone,) = test.measure([{"text": "code", "format": lossy["format"]}])
    assert alone.items() <= lossy.items()
    assert [line["format"] for line in summarize(log.rows)] == [*formats[1:]]
