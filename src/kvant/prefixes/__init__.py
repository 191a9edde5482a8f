"""Cache prefixes of prompts: prompts with the same first tokens share computed pages."""

from kvant.prefixes.keys import fingerprint
from kvant.prefixes.namespace import PendingRestore, PrefixNamespace
from kvant.prefixes.prefixes import Prefixes
from kvant.prefixes.restore import LookupDeadline

__all__ = [
    "LookupDeadline",
    "PendingRestore",
    "PrefixNamespace",
    "Prefixes",
    "fingerprint",
]
