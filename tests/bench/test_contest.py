"""The contest of caches at a context runs and says what it promises; nothing here is timed."""

from __future__ import annotations

import json

import pytest
import torch

from kvant.bench import contest, decode

TINY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 64,
    "vocab_size": 64,
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "SHAPE", contest.SHAPE | TINY)


def test_the_last_line_tells_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    decode.main("8,40", formats="raw,affine8", repeats=3, layers=2, peaks=False)
    said = capsys.readouterr()
    line = said.out.splitlines()[-1]
    told = json.loads(line)
    assert said.err == ""
    assert (told["bench"], told["layers"], told["dtype"]) == ("decode", 2, "bfloat16")
    assert told["machine"]["threads"] == torch.get_num_threads()
    contestants = [(row["rows"], row["cache"]) for row in told["rows"]]
    pairs = [(n, name) for n in (8, 40) for name in ("dynamic", "raw", "dynamic", "affine8")]
    assert contestants == pairs
    for row in told["rows"]:
        assert row["tokens"] == 3
        assert row["median_ms"] >= row["best_ms"] > 0 and row["ratio"] > 0
        assert row["peak_mib"] is None
        dense = row["rows"] * 2 * 2 * 2 * 32 * 2 / 2**20  # layers, sides, heads, width, bytes
        assert row["rest_mib"] == dense if row["cache"] == "dynamic" else row["rest_mib"] > 0


def test_both_caches_hold_the_same_rows_and_are_read_as_a_user_reads_them() -> None:
    model = contest.build(2)
    theirs, ours = contest.measure(model, "raw", 40, repeats=3)
    length = 40 + contest.FIRST + 3
    assert theirs.cache.get_seq_length() == ours.cache.get_seq_length() == length
    for layer, state in zip(theirs.cache.layers, ours.cache.states, strict=True):
        torch.testing.assert_close(state.read()[0][:, :, :40], layer.keys[:, :, :40])
        torch.testing.assert_close(state.read()[1], layer.values, atol=2e-2, rtol=2e-2)
    stats = ours.cache.stats()
    assert (stats["fused"], stats["materialized"]) == (2 * (contest.FIRST + 3), 0)


@pytest.mark.parametrize("name", ["dynamic", "affine8"])
def test_a_peak_is_a_number_where_the_system_keeps_one(name: str) -> None:
    found = contest.peak(1, name, 40, 2, torch.get_num_threads())
    assert (found is None) == (contest.mark() is None)
    assert found is None or found >= 0


@pytest.mark.parametrize(
    ("contexts", "formats", "why"), [("0", "raw", "1 row"), ("8", "raww", "raww")]
)
def test_what_cannot_be_measured_is_refused(contexts: str, formats: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decode.main(contexts, formats=formats, layers=1, peaks=False)
