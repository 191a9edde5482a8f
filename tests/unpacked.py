"""Dense copies of packed models, to compare with."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import kvant


def unpack_copy(packed: Any) -> Any:
    """Return a dense copy, which keeps rounded values."""
    plain = copy.deepcopy(packed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kvant.unpack(plain)
    return plain
