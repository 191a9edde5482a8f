"""The small language model inside the package, and the text that it knows.

transformers loads the model from `PATH`, see card.md. The text is the standard library of the
interpreter, but for a part: one file in fifty, chosen by a hash of its path, was held out of its
training, and there it can be measured.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

PATH = Path(__file__).resolve().parent

# Character tables, which are long and teach nothing about code.
SKIPPED = ("site-packages", "encodings", "__pycache__")
PROBED = 3  # files


def library_files(wanted: Callable[[str], bool] = lambda name: True) -> list[tuple[str, str]]:
    """(relative path, text) of the readable source files that are wanted, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [one for one in folders if one not in SKIPPED]
        names += [(Path(folder) / file).relative_to(root) for file in files if file[-3:] == ".py"]
    found = []
    for name in sorted(names):
        if not wanted(name.as_posix()):
            continue
        try:
            found.append((name.as_posix(), (root / name).read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return found


def is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 50 == 0


def held_out() -> list[str]:
    """The texts that the model was not trained on, in a fixed order, to measure formats by."""
    return _held_out()[:-PROBED]


def load_probe_prompts() -> list[str]:
    """The last of these, to choose formats by: nothing is measured on what it was chosen by."""
    return _held_out()[-PROBED:]


def _held_out() -> list[str]:
    return [text for _, text in library_files(is_held_out)]
