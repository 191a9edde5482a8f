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
    keys = [{"text": "code", "format": name} for name in formats]
    assert log.measure(keys, test.measure, minutes=5)
    generated, same, lossy, pruned = log.rows
    assert len(generated["tokens"]) == 64 + 64
    assert generated["tokens"] == test.measure(keys[0])["tokens"]
    assert same["kl"] == [0, 0] and same["identical"] == [4, 4]
    for row in (lossy, pruned):
        assert len(row["kl"]) == 2 and min(row["kl"]) > 0
    assert [line["format"] for line in summarize(log.rows)] == [*formats[1:]]
