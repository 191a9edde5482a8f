"""Prefixes of prompts: computed once, for whoever begins with the same tokens."""

from kvant.prefixes.keys import fingerprint
from kvant.prefixes.lookup_deadline import LookupDeadline
from kvant.prefixes.namespace import PendingRestore, PrefixNamespace
from kvant.prefixes.prefixes import Prefixes
from kvant.prefixes.tree import PrefixMismatch

__all__ = [
    "LookupDeadline",
    "PendingRestore",
    "PrefixMismatch",
    "PrefixNamespace",
    "Prefixes",
    "fingerprint",
]
