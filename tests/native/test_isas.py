"""Test the list of instruction sets, and that AVX-VNNI gives the bits of AVX2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import isas
import kvant.native
from kvant import Cache, attend
from kvant.attention import native
from kvant.native import NativeLibrary, get_library


@pytest.mark.skipif(get_library().functions is None, reason="the native library is not here")
def test_each_isa_is_available_or_reported_missing(capsys: pytest.CaptureFixture[str]) -> None:
    isas.main()
    out, error = capsys.readouterr()
    named = error.removeprefix("not on this processor: ").strip()
    missing = [isa for isa in named.split(", ") if isa]
    assert [isa for isa in isas.ISAS if isa not in missing] == out.split()
    assert get_library().isa in out.split() and "plain" in out.split()


def test_listing_isas_without_the_library_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a loop over an empty list would succeed."""
    monkeypatch.setattr(isas, "get_library", lambda: NativeLibrary(None, reason="not built"))
    with pytest.raises(SystemExit, match="no native library: not built"):
        isas.main()


@pytest.mark.skipif(get_library().functions is None, reason="the native library is not here")
@pytest.mark.parametrize("text", ["affine8", "affine3", "turbo4", "turbo2v3", "fp8"])
def test_avxvnni_gives_the_bits_of_avx2(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sums of integers are exact; everything else is the same code."""
    outputs = []
    rows = torch.randn(2, 1, 2, 301, 64).bfloat16()
    view = Cache(1, f"{text},prefill=stored")[0].append(*rows)
    q = torch.randn(1, 8, 1, 64)
    for isa in ("avxvnni", "avx2"):
        folder = tmp_path / isa
        folder.mkdir()
        library = isas.load_or_skip(isa, folder)
        for module in (native, kvant.native):
            monkeypatch.setattr(module, "get_library", lambda library=library: library)
        outputs.append(attend(q, view, backend="native"))
    assert torch.equal(*outputs)
