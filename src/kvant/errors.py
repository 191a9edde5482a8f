"""The exception tree. Every message gives the value, the limit and the way out."""


class CacheError(Exception):
    """Anything kvant refuses to do. What it was asked of is left unchanged."""


class SpecError(CacheError, ValueError):
    """A spec that cannot be read, or that contradicts itself."""


class PromptError(CacheError, ValueError):
    """A message that a model cannot be shown: by its template, or by the tokens it comes to."""


class CapacityError(CacheError):
    """More tokens than a fixed capacity has room for."""


class UnknownSequence(CacheError, LookupError):
    """An id that no sequence has: it never was, was removed, or was evicted."""


class RewindError(CacheError):
    """A length that a layer cannot go back to."""


class SnapshotMismatch(CacheError, ValueError):
    """A snapshot of another cache, or one whose parts do not fit together."""


class CacheFileError(CacheError, ValueError):
    """A file that is not a kvant cache, is damaged, or is of another version."""


class UnsupportedView(CacheError):
    """A view that the backend asked for by name does not read."""
