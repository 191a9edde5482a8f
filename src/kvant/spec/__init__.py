"""One string names a cache everywhere; one JSON object does so in the header of a file."""

from kvant.spec.formats import spelled
from kvant.spec.language import (
    as_spec,
    check_fitted,
    check_words,
    from_json,
    parse,
    split,
    to_json,
    words,
)

__all__ = [
    "as_spec",
    "check_fitted",
    "check_words",
    "from_json",
    "parse",
    "spelled",
    "split",
    "to_json",
    "words",
]
