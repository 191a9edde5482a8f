"""The compiled library, as Python sees it: below everything that computes with it."""

from kvant.native.library import Library, library

__all__ = ["Library", "library"]
