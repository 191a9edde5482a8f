"""The spec language: a string describes a cache to users, a JSON object in file headers."""

from kvant.spec.formats import format_codecs
from kvant.spec.language import (
    as_spec,
    check_fitted,
    describe_spec,
    from_json,
    parse,
    parse_words,
    refuse_second_pass,
    split_specs,
    to_json,
)

__all__ = [
    "as_spec",
    "check_fitted",
    "describe_spec",
    "format_codecs",
    "from_json",
    "parse",
    "parse_words",
    "refuse_second_pass",
    "split_specs",
    "to_json",
]
