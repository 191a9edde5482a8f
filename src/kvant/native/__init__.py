"""The compiled library, as Python sees it: below everything that computes with it."""

from kvant.native.library import DTYPES, Library, behind, done, library, part_teams
from kvant.native.rotation import Signs, present, rotatable, rotated
from kvant.native.rows import check_room, put

__all__ = [
    "DTYPES",
    "Library",
    "Signs",
    "behind",
    "check_room",
    "done",
    "library",
    "part_teams",
    "present",
    "put",
    "rotatable",
    "rotated",
]
