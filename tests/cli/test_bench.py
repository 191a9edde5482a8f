"""Test `kvant bench` as installed: equal to `python -m kvant.bench.NAME`."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import kvant.bench
from kvant.cli.main import BENCHES
from kvant.native import NativeLibrary

KVANT = str(Path(sys.executable).with_name("kvant"))
APPEND = ("append", "--lengths", "8", "--tokens", "2", "--heads", "1", "--dim", "32")
DECODE = ("decode", "--formats", "raw", "--lengths", "8", "--prompt", "4", "--tokens", "2")
DECODE += ("--runs", "1", "--repeats", "2")


def run_module(*words: str) -> tuple[int, str, str]:
    """Return exit code, standard output, standard error."""
    process = subprocess.run(words, capture_output=True, text=True, check=False)
    return process.returncode, process.stdout, process.stderr


def test_the_last_line_is_json() -> None:
    code, out, error = run_module(KVANT, "bench", *APPEND)
    assert (code, error) == (0, "")
    assert json.loads(out.splitlines()[-1])["bench"] == "append"


def test_model_is_measured_in_the_given_dtype(call: Any) -> None:
    words = ("--prompt", "8", "--chunks", "8", "--repeats", "1", "--formats", "raw", "--json")
    rows = [
        json.loads(call("bench", "prefill", *words, "--dtype", dtype)[1])
        for dtype in ("auto", "float32")
    ]
    assert [row["dtype"] for row in rows] == ["bfloat16", "float32"]
    assert rows[1]["rows"][0]["nbytes"] == 2 * rows[0]["rows"][0]["nbytes"]


def test_unavailable_peer_is_skipped_with_one_line(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvant.bench.decode.find_spec", lambda name: None)
    code, out, error = call("bench", *DECODE, "--against", "transformers,mlx-lm")
    report = json.loads(out.splitlines()[-1])
    assert (code, report["bench"], len(report["skipped"])) == (0, "decode", 1)
    assert error == "skipped: mlx-lm is not installed\n"


def test_every_benchmark_has_a_module_and_vice_versa() -> None:
    modules = [info.name for info in pkgutil.iter_modules(kvant.bench.__path__)]
    mains = [name for name in modules if hasattr(import_module(f"kvant.bench.{name}"), "main")]
    assert set(mains) - {"markdown"} == set(BENCHES)


def test_every_benchmark_is_listed_with_the_first_line_of_its_help() -> None:
    for name, line in BENCHES.items():
        doc = import_module(f"kvant.bench.{name}").main.__doc__ or ""
        assert " ".join(doc.partition("\n\n")[0].split()) == line


def test_weights_are_not_measured_without_the_native_library(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = NativeLibrary(None, reason="it was not built")
    monkeypatch.setattr("kvant.bench.weights.get_library", lambda: missing)
    code, out, error = call("bench", "weights")
    assert (code, out) == (2, "") and "nothing to measure: it was not built" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("attend", "--device", "tpu"), "--device tpu: known are cpu, cuda"),
        (("attend9",), "choose one of agents, append, attend, batch, conversations, decode"),
        (("agents", "--sessions", "naps"), "--sessions naps: known are tool loop, changing header"),
        (("prefill", "--chunks", "0"), "--chunks 0"),
        (("prefill", "--prompt", "99999"), "the context of the model"),
        (("decode", "--against", "vllm"), "--against vllm: known are transformers"),
        (("decode", "--formats", "affine9"), "nearest: affine8"),
        (("decode", "--contexts", "8", "--lengths", "8"), "without --contexts"),
        (("decode", "--model", "./nowhere"), "no such folder"),
        (("decode", "--dtype", "int8"), "--dtype int8: known are auto, float32"),
        (("decode", "--contexts", "8", "--dtype", "auto"), "without --contexts"),
        (("prefill", "--dtype", "int8"), "--dtype int8: known are auto, float32"),
    ],
    ids=str,
)
def test_user_error_is_one_line_and_exit_code_2(
    words: tuple[str, ...], message: str, call: Any
) -> None:
    code, out, error = call("bench", *words)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("error: ") and message in error


@pytest.mark.parametrize(
    "words", [("attend",), ("decode",), ("decode", "--contexts", "8"), ("prefill",)], ids=str
)
def test_missing_gpu_is_one_line_and_exit_code_2(
    words: tuple[str, ...], call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, error = call("bench", *words, "--device", "cuda")
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("error: --device cuda: torch ") and "finds no GPU here" in error


def test_module_takes_the_same_arguments_and_fails_the_same_way(call: Any) -> None:
    words = ("--contexts", "8", "--formats", "affine9", "--layers", "1")
    ends = [
        run_module(sys.executable, "-m", "kvant.bench.decode", *words),
        call("bench", "decode", *words),
    ]
    assert ends[0] == ends[1]
    assert ends[0][0] == 2
