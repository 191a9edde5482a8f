"""Test the list of instruction sets that `make sanitize` and `make fuzz` use."""

from __future__ import annotations

import pytest

import isas
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
