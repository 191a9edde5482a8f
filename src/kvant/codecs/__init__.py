"""The formats of sealed pages, by the name they have on disk."""

from kvant.codecs.affine import Affine
from kvant.codecs.codebook import Codebook
from kvant.codecs.fp8 import Fp8
from kvant.codecs.raw import Raw
from kvant.contracts import Codec

CODECS: dict[str, type[Codec]] = {
    "raw": Raw,
    "affine": Affine,
    "codebook": Codebook,
    "fp8": Fp8,
}

__all__ = ["CODECS", "Affine", "Codebook", "Fp8", "Raw"]
