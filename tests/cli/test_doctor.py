"""`kvant doctor`: what runs, what does not, and a kernel that computes something else."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from kvant.attention.native import NativeBackend
from kvant.native import NativeLibrary, get_library


def test_it_says_what_runs(call: Any) -> None:
    code, out, error = call("doctor")
    assert (code, error) == (0, "")
    assert f"torch {torch.__version__}" in out
    assert "triton on cpu" in out and "does not: rows on cpu" in out
    assert (get_library().isa or get_library().reason) in out
    assert "self-test: " in out


@pytest.mark.skipif(
    get_library().isa != "avx512", reason="needs AVX-512 with BF16; with AMX oneDNN adds otherwise"
)
def test_it_says_that_the_kernel_multiplies(call: Any) -> None:
    assert "rows by our kernel" in json.loads(call("doctor", "--json")[1])["packed_weights"]


def test_figures_for_programs(call: Any) -> None:
    told = json.loads(call("doctor", "--json")[1])
    assert told["healthy"] and told["backends"]["cpu"]["reference"] is None
    assert told["backends"]["cpu"]["triton"] == "rows on cpu"
    if get_library().functions is not None:
        tested = {row["format"] for row in told["self_test"] if row["backend"] == "native"}
        assert {"raw", "affine8", "fp8", "turbo4"} <= tested


@pytest.mark.skipif(get_library().functions is None, reason="the native library is not here")
def test_a_kernel_that_is_wrong_is_found(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = NativeBackend.attend

    def wrong(self: NativeBackend, request: Any, view: Any) -> Any:
        out, lse = right(self, request, view)
        return out + 0.01, lse

    monkeypatch.setattr(NativeBackend, "attend", wrong)
    code, out, _ = call("doctor")
    assert code == 1 and "WRONG: native on cpu" in out and "self-test" not in out


def test_without_kernels_it_says_so(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = NativeLibrary(None, reason="the native library was not built (is there a C++ compiler?)")
    for place in ("kvant.native", "kvant.attention.native", "kvant.packed_matrix"):
        monkeypatch.setattr(f"{place}.get_library", lambda: gone, raising=False)
    code, out, _ = call("doctor")
    assert code == 0 and gone.reason in out
    assert call("doctor", "--kernels")[0] == 1


def test_kernels_that_are_there_are_enough(call: Any) -> None:
    assert call("doctor", "--kernels")[0] == (get_library().functions is None)
