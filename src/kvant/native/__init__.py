"""The compiled library, as Python sees it: below everything that computes with it."""

from kvant.native.library import DTYPES, Library, library
from kvant.native.rotation import Signs, rotated, turns
from kvant.native.rows import put

__all__ = ["DTYPES", "Library", "Signs", "library", "put", "rotated", "turns"]
