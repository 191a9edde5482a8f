"""Prefixes of prompts: computed once, for whoever begins with the same tokens."""

from kvant.prefixes.keys import fingerprint
from kvant.prefixes.prefixes import Prefixes
from kvant.prefixes.shelf import Coming, Shelf
from kvant.prefixes.tree import Lost
from kvant.prefixes.waiting import Waiting

__all__ = ["Coming", "Lost", "Prefixes", "Shelf", "Waiting", "fingerprint"]
