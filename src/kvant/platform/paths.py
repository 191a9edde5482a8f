"""Check and expand the paths that users give."""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path


def expand_path(path: str | PathLike[str]) -> Path:
    """Expand `~` and `~user`; raise ValueError for a user without a home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path}: there is no such home folder") from error


def check_writable(path: Path | None, flag: str, *, is_replaced: bool = False) -> None:
    """Raise an error for an output file that cannot be written, before any work is done.

    A file that `is_replaced` by a new one needs permission for its folder alone.
    """
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: the name of a file in an existing folder is needed")
    if is_replaced and path.exists() and not path.is_file():
        raise ValueError(f"{flag} {path}: the name of a regular file is needed")
    target = path if path.exists() and not is_replaced else path.parent
    if not os.access(target, os.W_OK):
        raise ValueError(f"{flag} {path}: {target} cannot be written: permission denied")
