"""The small language model inside the package, and its text.

transformers loads the model from `PATH`, see card.md. The text is the standard library of the
interpreter. One file in fifty, chosen by a hash of its path, was held out of the training; these
files serve as test set.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

PATH = Path(__file__).resolve().parent

SKIPPED_FOLDERS = ("site-packages", "encodings", "__pycache__")  # encodings: character tables
NUM_PROBE_FILES = 3


def list_library_files(
    is_wanted: Callable[[str], bool] = lambda name: True,
) -> list[tuple[str, str]]:
    """Return (relative path, text) of the readable source files, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        names += [(Path(folder) / file).relative_to(root) for file in files if file[-3:] == ".py"]
    texts = []
    for name in sorted(names):
        if not is_wanted(name.as_posix()):
            continue
        try:
            texts.append((name.as_posix(), (root / name).read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return texts


def is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 50 == 0


def load_held_out_texts() -> list[str]:
    """Return the held-out texts, sorted by path, to measure formats on."""
    return _load_held_out()[:-NUM_PROBE_FILES]


def load_probe_prompts() -> list[str]:
    """Return the last held-out texts, to choose formats by: no measurement uses these."""
    return _load_held_out()[-NUM_PROBE_FILES:]


def _load_held_out() -> list[str]:
    return [text for _, text in list_library_files(is_held_out)]
