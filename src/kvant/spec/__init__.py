"""One string names a cache everywhere; one JSON object does so in the header of a file."""

from kvant.spec.formats import format_codecs
from kvant.spec.language import (
    as_spec,
    check_fitted,
    check_words,
    describe_spec,
    from_json,
    parse,
    split_specs,
    to_json,
)

__all__ = [
    "as_spec",
    "check_fitted",
    "check_words",
    "describe_spec",
    "format_codecs",
    "from_json",
    "parse",
    "split_specs",
    "to_json",
]
