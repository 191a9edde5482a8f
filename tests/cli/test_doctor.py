"""Test `kvant doctor`: available features, missing features, and a kernel with wrong results."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from kvant.attention.native import NativeBackend
from kvant.native import NativeLibrary, get_library


def test_report_lists_what_runs(call: Any) -> None:
    code, out, error = call("doctor")
    assert (code, error) == (0, "")
    assert f"torch {torch.__version__}" in out
    assert "triton on cpu" in out and "unavailable: rows on cpu" in out
    assert (get_library().isa or get_library().reason) in out
    assert "self-test: " in out


def test_json_has_the_figures(call: Any) -> None:
    report = json.loads(call("doctor", "--json")[1])
    assert report["healthy"] and report["backends"]["cpu"]["reference"] is None
    assert report["backends"]["cpu"]["triton"] == "rows on cpu"
    if get_library().functions is not None:
        tested = {row["format"] for row in report["self_test"] if row["backend"] == "native"}
        assert {"raw", "affine8", "fp8", "turbo4"} <= tested


@pytest.mark.skipif(get_library().functions is None, reason="the native library is not here")
@pytest.mark.parametrize("error", [0.01, math.nan])
def test_wrong_kernel_is_detected(error: float, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = NativeBackend.attend

    def wrong(self: NativeBackend, request: Any, view: Any) -> Any:
        out, lse = right(self, request, view)
        return out + error, lse

    monkeypatch.setattr(NativeBackend, "attend", wrong)
    code, out, _ = call("doctor")
    assert code == 1 and "WRONG: native on cpu" in out and "self-test" not in out


def test_missing_kernels_are_reported(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    no_library = NativeLibrary(
        None, reason="the native library was not built (is there a C++ compiler?)"
    )
    for place in ("kvant.native", "kvant.attention.native"):
        monkeypatch.setattr(f"{place}.get_library", lambda: no_library, raising=False)
    code, out, _ = call("doctor")
    assert code == 0 and no_library.reason in out
    assert call("doctor", "--kernels")[0] == 1


def test_available_kernels_pass(call: Any) -> None:
    assert call("doctor", "--kernels")[0] == (get_library().functions is None)
