"""The versions of transformers that kvant is known to work with; outside them, one warning."""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib.metadata import requires, version

from packaging.requirements import Requirement

log = logging.getLogger("kvant")


@lru_cache(maxsize=1)
def check_version() -> None:
    """Warn once, if need be. The range stands in pyproject.toml."""
    known, have = known_range(), version("transformers")
    if known is not None and not known.specifier.contains(have, prereleases=True):
        log.warning(
            "transformers %s is outside %s, which kvant is known to work with",
            have,
            known.specifier,
        )


def known_range() -> Requirement | None:
    found = [Requirement(line) for line in requires("kvant") or ()]
    return next((r for r in found if r.marker and "known" in str(r.marker)), None)
