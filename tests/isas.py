"""The native library on each instruction set that it was compiled for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvant.native import Library, library, load

ISAS = ("amx", "avx512", "avx2", "plain")


def loaded_for(isa: str, folder: Path) -> Library:
    """A copy of the library for one instruction set: it is chosen once, when it is loaded."""
    functions = library().functions
    assert functions is not None
    copy = folder / Path(functions._name).name
    shutil.copy(functions._name, copy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVANT_ISA", isa)
        found = load(copy)
    if found.functions is None:
        pytest.skip(found.reason)
    assert found.isa == isa
    return found
