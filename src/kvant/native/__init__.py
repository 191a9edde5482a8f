"""The compiled library, as Python sees it: below everything that computes with it."""

from kvant.native.library import DTYPES, Library, library, part_teams
from kvant.native.rotation import Signs, present, rotatable, rotated
from kvant.native.rows import put

__all__ = [
    "DTYPES",
    "Library",
    "Signs",
    "library",
    "part_teams",
    "present",
    "put",
    "rotatable",
    "rotated",
]
