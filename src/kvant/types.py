"""What a package implements to extend kvant: codecs, scores, retention rules and stores.

    class                register it with          a package lists it in       names it
    Codec                kvant.register_codec      kvant.codecs                --kv-cache NAME
    Score                kvant.register_score      kvant.scores                prune=NAME:KEEP
    Retention            kvant.register_retention  kvant.retentions            retain=NAME
    Store, by a URL      kvant.register_store      kvant.stores                --store NAME://...

Subclass `Codec`, `Score` and `Retention` as frozen dataclasses: their other members then have the
defaults that are documented there. Nothing else in kvant has to know about yours.

    >>> field = kvant.types.Field(torch.int8, width=64)  # 64 bytes a row
    >>> field.height(page=64)
    64
"""

from kvant.codecs.frames import Identity, Rotation
from kvant.contracts import Codec, Field, Fields, Frame
from kvant.retention import Retention, Score, ScoreInput
from kvant.stores.contract import Bytes, Store

__all__ = [
    "Bytes",
    "Codec",
    "Field",
    "Fields",
    "Frame",
    "Identity",
    "Retention",
    "Rotation",
    "Score",
    "ScoreInput",
    "Store",
]
