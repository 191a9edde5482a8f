"""One string names a cache everywhere; one JSON object does so in the header of a file."""

from kvant.spec.formats import spelled
from kvant.spec.language import as_spec, from_json, parse, split, to_json

__all__ = ["as_spec", "from_json", "parse", "spelled", "split", "to_json"]
