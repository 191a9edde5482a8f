"""The benchmark of a model that generates runs and says what it promises; nothing here is timed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvant import demo
from kvant.bench import candidates, decode, report, speed
from kvant.bench.candidates import SequenceCacheCandidate, make_candidates
from kvant.bench.speed import measure_generations
from kvant.checkpoints import load
from kvant.spec import split_specs

SMALL: dict[str, Any] = {"lengths": "8,16", "prompt": 6, "tokens": 3, "runs": 1, "repeats": 2}
FORMATS = "none,raw,step=1,affine8"


def greedy(candidate: SequenceCacheCandidate, prompt: Sequence[int], count: int) -> list[int]:
    tokens = [candidate.feed(prompt)]
    while len(tokens) < count:
        tokens.append(candidate.feed(tokens[-1:]))
    return tokens


def test_the_last_line_tells_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    decode.main(formats=FORMATS, **SMALL)
    said = capsys.readouterr()
    line = said.out.splitlines()[-1]
    told = json.loads(line)
    assert said.err == ""
    assert (told["bench"], told["dtype"], told["skipped"]) == ("decode", "bfloat16", [])
    assert list(told["peers"]) == ["transformers"]
    names = ["none", "raw,step=1", "affine8", "transformers"]
    assert [row["cache"] for row in told["rows"]] == names
    for row in told["rows"]:
        assert row["first_ms"] > 0 and row["tokens_s"] > 0
        assert row["vs_none"] > 0 and row["vs_transformers"] > 0
    points = [(row["length"], row["cache"]) for row in told["latency"]]
    assert points == [(length, name) for length in (8, 16) for name in names]
    assert all(row["median_ms"] >= row["best_ms"] > 0 for row in told["latency"])


def test_bytes_are_those_of_the_tokens_held() -> None:
    model, tokenizer = load(None)
    text = decode.read_text_tokens(model, tokenizer, 6)
    makes = (
        make_candidates(model, split_specs(FORMATS))
        | candidates.find_peers(["transformers"], model, "")[0]
    )
    held = {
        row["cache"]: row["cache_kib"]
        for row in measure_generations(makes, text, tokens=3, num_runs=1)
    }
    dense = 8 * 6 * 2 * 2 * 64 * 2 / 1024  # tokens, layers, sides, heads, width, bytes
    page = 64 / 8 * dense  # memory is by whole pages of 64 rows
    assert (held["none"], held["raw,step=1"], held["transformers"]) == (0, page, dense)


def test_all_continue_the_same_text() -> None:
    model, tokenizer = load(None)
    model = model.float()
    text = decode.read_text_tokens(model, tokenizer, 70)
    makes = (
        make_candidates(model, ["none", "raw"])
        | candidates.find_peers(["transformers"], model, "")[0]
    )
    said = {name: greedy(make(), text, 8) for name, make in makes.items()}
    assert said["none"] == said["raw"] == said["transformers"]


def test_a_candidate_is_brought_to_a_length_and_then_reads_one_token_at_a_time() -> None:
    class Scribe:
        nbytes = 0

        def feed(self, tokens: Sequence[int]) -> int:
            fed.append(list(tokens))
            return 0

    fed: list[list[int]] = []

    rows = speed.measure_latencies({"scribe": Scribe}, range(100), [10, 20], repeats=3)
    begin = speed.WARMUP_TOKENS + 3  # tokens before a length that come one at a time
    assert fed[: begin + 1] == [list(range(10 - begin)), *([n] for n in range(10 - begin, 10))]
    assert fed[begin + 1 :] == [list(range(10, 20 - begin)), *([n] for n in range(20 - begin, 20))]
    assert [row["length"] for row in rows] == [10, 20]


def test_a_curve_is_drawn_on_the_scale_of_the_slowest() -> None:
    rows = [
        {"length": length, "cache": name, "median_ms": ms}
        for length, name, ms in [
            (1, "none", 1.0),
            (2, "none", 8.0),
            (1, "raw", 0.5),
            (2, "raw", 4.0),
        ]
    ]
    told = speed.make_latency_rows(rows)
    assert told[0] == {"cache": "none", "1": 1.0, "2": 8.0, "curve": "\u2582\u2588"}
    assert told[1]["curve"] == "\u2581\u2585"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"formats": "raww"}, "raww"),
        ({"against": "vllm"}, "known are transformers, llama-cpp, mlx-lm"),
        ({"lengths": "8,9"}, "9 after 8"),
        ({"lengths": "8,x"}, "whole numbers"),
        ({"lengths": "128,4096"}, "the context of the model has 2048"),
        ({"layers": 2}, "--layers is for a run with --contexts"),
        ({"contexts": "8", "model": "somewhere"}, "--model is for a run without --contexts"),
        ({"plot": Path("nowhere/a.png")}, "there is no folder nowhere"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decode.main(**({} if "contexts" in given else SMALL) | given)


def test_a_peer_that_is_not_there_is_said_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = load(None)
    monkeypatch.setattr(candidates, "find_spec", lambda name: None)
    makes, skipped = candidates.find_peers(["transformers", "llama-cpp", "mlx-lm"], model, "")
    assert list(makes) == ["transformers"]
    assert skipped == ["llama-cpp-python is not installed", "mlx-lm is not installed"]


def test_a_peer_that_reads_other_files_is_said_and_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _ = load(None)
    monkeypatch.setattr(candidates, "find_spec", lambda name: object())
    assert "GGUF" in candidates.find_peers(["llama-cpp"], model, "")[1][0]


def test_mlx_continues_the_same_text() -> None:
    pytest.importorskip("mlx_lm", reason="an optional peer")
    model, tokenizer = load(None)
    text = decode.read_text_tokens(model, tokenizer, 70)
    makes, skipped = candidates.find_peers(["mlx-lm"], model, str(demo.PATH))
    if skipped:
        pytest.skip(skipped[0])
    assert greedy(makes["mlx-lm"](), text, 8) == greedy(
        make_candidates(model, ["raw"])["raw"](), text, 8
    )


def test_a_picture_needs_matplotlib_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs matplotlib: pip install matplotlib"):
        decode.main(plot=tmp_path / "a.png")


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="only pictures need it")
    file = tmp_path / "a.png"
    report.draw_curves(
        {"none": {128: 9.0, 256: 20.0}, "raw": {128: 4.0, 256: 4.5}}, "title", file, "ms"
    )
    assert file.read_bytes()[:4] == b"\x89PNG"
