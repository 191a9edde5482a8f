"""Test that the decode benchmark runs and reports its fields; nothing here is timed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvant import demo
from kvant.bench import decode, harness
from kvant.bench.decode import Candidate, make_candidates, measure_generations
from kvant.checkpoints import load
from kvant.spec import split_specs

SMALL: dict[str, Any] = {"lengths": "8,16", "prompt": 6, "tokens": 3, "runs": 1, "repeats": 2}
FORMATS = "none,raw,step=1,affine8"


def decode_greedily(candidate: Candidate, prompt: Sequence[int], count: int) -> list[int]:
    tokens = [candidate.feed(prompt)]
    while len(tokens) < count:
        tokens.append(candidate.feed(tokens[-1:]))
    return tokens


def test_last_line_holds_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    decode.main(formats=FORMATS, **SMALL)
    captured = capsys.readouterr()
    line = captured.out.splitlines()[-1]
    report = json.loads(line)
    assert captured.err == ""
    assert (report["bench"], report["dtype"], report["skipped"]) == ("decode", "bfloat16", [])
    assert list(report["peers"]) == ["transformers"]
    names = ["none", "raw,step=1", "affine8", "transformers"]
    assert [row["cache"] for row in report["rows"]] == names
    for row in report["rows"]:
        assert row["first_ms"] > 0 and row["tokens_s"] > 0
        assert row["vs_none"] > 0 and row["vs_transformers"] > 0
    points = [(row["length"], row["cache"]) for row in report["latency"]]
    assert points == [(length, name) for length in (8, 16) for name in names]
    assert all(row["median_ms"] >= row["best_ms"] > 0 for row in report["latency"])


def test_bytes_are_those_of_the_cached_tokens() -> None:
    model, tokenizer = load(None)
    text = decode.read_text_tokens(model, tokenizer, 6)
    factories = (
        make_candidates(model, split_specs(FORMATS))
        | decode.make_peers(["transformers"], model, "")[0]
    )
    cached_tokens = {
        row["cache"]: row["cache_kib"]
        for row in measure_generations(factories, text, tokens=3, num_runs=1)
    }
    dense = 8 * 6 * 2 * 2 * 64 * 2 / 1024  # tokens, layers, sides, heads, width, bytes
    page = 64 / 8 * dense  # memory is allocated in whole pages of 64 rows
    assert (cached_tokens["none"], cached_tokens["raw,step=1"], cached_tokens["transformers"]) == (
        0,
        page,
        dense,
    )


def test_all_candidates_continue_the_same_text() -> None:
    model, tokenizer = load(None)
    model = model.float()
    text = decode.read_text_tokens(model, tokenizer, 70)
    factories = (
        make_candidates(model, ["none", "raw"]) | decode.make_peers(["transformers"], model, "")[0]
    )
    replies = {name: decode_greedily(make(), text, 8) for name, make in factories.items()}
    assert replies["none"] == replies["raw"] == replies["transformers"]


def test_candidate_prefills_to_a_length_then_decodes_token_by_token() -> None:
    def feed(tokens: Sequence[int]) -> int:
        inputs.append(list(tokens))
        return 0

    inputs: list[list[int]] = []

    rows = decode.measure_latencies(
        {"scribe": lambda: Candidate(feed, int)}, range(100), [10, 20], repeats=3
    )
    begin = decode.WARMUP_TOKENS + 3  # tokens decoded one at a time before a length
    assert inputs[: begin + 1] == [list(range(10 - begin)), *([n] for n in range(10 - begin, 10))]
    assert inputs[begin + 1 :] == [
        list(range(10, 20 - begin)),
        *([n] for n in range(20 - begin, 20)),
    ]
    assert [row["length"] for row in rows] == [10, 20]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"formats": "raww"}, "raww"),
        ({"against": "vllm"}, "known are transformers, mlx-lm"),
        ({"lengths": "8,9"}, "9 after 8"),
        ({"lengths": "8,x"}, "whole numbers"),
        ({"lengths": "128,4096"}, "the context of the model has 2048"),
        ({"layers": 2}, "--layers is for a run with --contexts"),
        ({"contexts": "8", "model": "somewhere"}, "--model is for a run without --contexts"),
        ({"plot": Path("nowhere/a.png")}, "a file in an existing folder"),
        ({"plot": Path("a.svg")}, "a name that ends in .png is needed"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode.main(**({} if "contexts" in options else SMALL) | options)


def test_missing_peer_is_reported_and_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = load(None)
    monkeypatch.setattr(decode, "find_spec", lambda name: None)
    factories, skipped = decode.make_peers(["transformers", "mlx-lm"], model, "")
    assert (list(factories), skipped) == (["transformers"], ["mlx-lm is not installed"])


def test_peer_that_cannot_load_the_model_is_reported_and_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _ = load(None)
    monkeypatch.setattr(decode, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "mlx_lm", None)  # its import fails
    factories, skipped = decode.make_peers(["mlx-lm"], model, "")
    assert factories == {} and skipped[0].startswith("mlx-lm cannot run this model here: ")


def test_mlx_continues_the_same_text() -> None:
    pytest.importorskip("mlx_lm", reason="an optional peer")
    model, tokenizer = load(None)
    text = decode.read_text_tokens(model, tokenizer, 70)
    factories, skipped = decode.make_peers(["mlx-lm"], model, str(demo.PATH))
    if skipped:
        pytest.skip(skipped[0])
    assert decode_greedily(factories["mlx-lm"](), text, 8) == decode_greedily(
        make_candidates(model, ["raw"])["raw"](), text, 8
    )


def test_plot_without_matplotlib_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs matplotlib: pip install matplotlib"):
        decode.main(plot=tmp_path / "a.png")


def test_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="only pictures need it")
    file = tmp_path / "a.png"
    harness.draw_curves(
        {"none": {128: 9.0, 256: 20.0}, "raw": {128: 4.0, 256: 4.5}}, "title", file, "ms"
    )
    assert file.read_bytes()[:4] == b"\x89PNG"
