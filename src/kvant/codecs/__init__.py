"""Codecs of sealed pages, registered under their names in files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvant.contracts import Codec
from kvant.lazy import Registry, lazy_names

if TYPE_CHECKING:
    from kvant.codecs.affine import Affine
    from kvant.codecs.codebook import Codebook
    from kvant.codecs.fp8 import Fp8
    from kvant.codecs.raw import Raw

CODECS: Registry[type[Codec]] = Registry(
    {
        "raw": "kvant.codecs.raw:Raw",
        "affine": "kvant.codecs.affine:Affine",
        "codebook": "kvant.codecs.codebook:Codebook",
        "fp8": "kvant.codecs.fp8:Fp8",
    }
)

__all__ = ["CODECS", "Affine", "Codebook", "Fp8", "Raw"]

if not TYPE_CHECKING:  # otherwise type checkers would accept any name
    __getattr__ = lazy_names(
        __name__,
        {
            "kvant.codecs.affine": "Affine",
            "kvant.codecs.codebook": "Codebook",
            "kvant.codecs.fp8": "Fp8",
            "kvant.codecs.raw": "Raw",
        },
    )
