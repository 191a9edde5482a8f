"""The compiled library, as Python sees it: below everything that computes with it."""

from kvant.native.library import DTYPES, Library, library
from kvant.native.rotation import Signs, rotated, turns

__all__ = ["DTYPES", "Library", "Signs", "library", "rotated", "turns"]
