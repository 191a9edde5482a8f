"""The text that the demo model knows: the standard library of the interpreter, but for a part.

One file in fifty, chosen by a hash of its path, was held out of its training: there it can be
measured.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable
from pathlib import Path

# Character tables, which are long and teach nothing about code.
SKIPPED = ("site-packages", "encodings", "__pycache__")


def library_files(wanted: Callable[[str], bool] = lambda name: True) -> list[tuple[str, str]]:
    """(relative path, text) of the readable source files that are wanted, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if any(part in SKIPPED for part in name.parts) or not wanted(name.as_posix()):
            continue
        try:
            found.append((name.as_posix(), path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return found


def is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 50 == 0


def held_out() -> list[str]:
    """The texts that the model was not trained on, in a fixed order."""
    return [text for _, text in library_files(is_held_out)]
