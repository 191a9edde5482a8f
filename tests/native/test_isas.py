"""The list of instruction sets that `make sanitize` and `make fuzz` go through."""

from __future__ import annotations

import pytest

import isas
from kvant.native import NativeLibrary, get_library


@pytest.mark.skipif(get_library().functions is None, reason="the native library is not here")
def test_each_set_is_available_or_named_as_missing(capsys: pytest.CaptureFixture[str]) -> None:
    isas.main()
    out, error = capsys.readouterr()
    named = error.removeprefix("not on this processor: ").strip()
    missing = [isa for isa in named.split(", ") if isa]
    assert [isa for isa in isas.ISAS if isa not in missing] == out.split()
    assert get_library().isa in out.split() and "plain" in out.split()


def test_without_the_library_the_list_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a loop over an empty list would succeed."""
    monkeypatch.setattr(isas, "get_library", lambda: NativeLibrary(None, reason="not built"))
    with pytest.raises(SystemExit, match="no native library: not built"):
        isas.main()
