"""The native library on each instruction set that it was compiled for.

`python tests/isas.py` prints those that the processor has, and which are missing to standard error.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvant.native import NativeLibrary, get_library, load_library

ISAS = ("amx", "avx512", "avx2", "plain")


def loaded_for(isa: str, folder: Path) -> NativeLibrary:
    """A copy of the library for one instruction set; a test of one that is missing is skipped."""
    found = load_copy(isa, folder)
    if found.functions is None:
        pytest.skip(found.reason)
    return found


def load_copy(isa: str, folder: Path) -> NativeLibrary:
    """Load a copy of the library: its instruction set is chosen once, when it is loaded."""
    functions = get_library().functions
    assert functions is not None
    copy = folder / Path(functions._name).name
    shutil.copy(functions._name, copy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVANT_ISA", isa)
        found = load_library(copy)
    assert found.functions is None or found.isa == isa
    return found


def list_available_isas() -> list[str]:
    """List the instruction sets that the processor has."""
    found = []
    for isa in ISAS:
        with TemporaryDirectory() as folder:
            if load_copy(isa, Path(folder)).functions is not None:
                found.append(isa)
    return found


def main() -> None:
    if get_library().functions is None:
        raise SystemExit(f"no native library: {get_library().reason}")
    found = list_available_isas()
    if missing := [isa for isa in ISAS if isa not in found]:
        print(f"not on this processor: {', '.join(missing)}", file=sys.stderr)
    print(*found)


if __name__ == "__main__":
    main()
