"""The compiled library, as Python sees it: below everything that computes with it."""

from kvant.native.library import DTYPES, Library, behind, done, library, part_teams
from kvant.native.rotation import Signs, present, rotatable, rotated

__all__ = [
    "DTYPES",
    "Library",
    "Signs",
    "behind",
    "done",
    "library",
    "part_teams",
    "present",
    "rotatable",
    "rotated",
]
