"""The native library on each instruction set that it was compiled for.

`python tests/isas.py` prints the instruction sets of the processor, and the missing ones to
standard error.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from platform import machine
from tempfile import TemporaryDirectory

import pytest

from kvant.native import NativeLibrary, get_library, load_library

X86_ISAS = ("amx", "avx512", "avxvnni", "avx2")
ARM_ISAS = ("neon+dotprod+i8mm", "neon+dotprod", "neon")
ISAS = (*(ARM_ISAS if machine() in ("aarch64", "arm64") else X86_ISAS), "plain")


def load_or_skip(isa: str, folder: Path) -> NativeLibrary:
    """Return a copy of the library for one instruction set; skip the test if it is missing."""
    library = load_copy(isa, folder)
    if library.functions is None:
        pytest.skip(library.reason)
    return library


def load_copy(isa: str, folder: Path) -> NativeLibrary:
    """Load a copy of the library: its instruction set is chosen once, when it is loaded."""
    functions = get_library().functions
    assert functions is not None
    copy = folder / Path(functions._name).name
    shutil.copy(functions._name, copy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVANT_ISA", isa)
        library = load_library(copy)
    assert library.functions is None or library.isa == isa
    return library


def list_available_isas() -> list[str]:
    """List the instruction sets that the processor has."""
    isas = []
    for isa in ISAS:
        with TemporaryDirectory() as folder:
            if load_copy(isa, Path(folder)).functions is not None:
                isas.append(isa)
    return isas


def main() -> None:
    if get_library().functions is None:
        raise SystemExit(f"no native library: {get_library().reason}")
    isas = list_available_isas()
    if missing := [isa for isa in ISAS if isa not in isas]:
        print(f"not on this processor: {', '.join(missing)}", file=sys.stderr)
    print(*isas)


if __name__ == "__main__":
    main()
