"""What specs and headers name: codecs, scores and retention rules of kvant, programs and packages.

A name is a word of the spec language, so it matches NAME and is no other word of it. A class is a
frozen dataclass whose fields have defaults and a JSON form: a spec names it alone, a header with
its fields. The functions `register_...` are public.
"""

from __future__ import annotations

import re
from typing import Any

from kvant.codecs import CODECS
from kvant.contracts import Codec
from kvant.errors import ExtensionError
from kvant.platform.extensions import ExtensionTable
from kvant.retention import RETENTIONS, SCORES, Retention, Score

NAME = re.compile("[a-z][a-z0-9_-]{0,63}", re.ASCII)
CODEC_MEMBERS = ("fields", "seal", "open", "frame", "exact", "limit", "tail")
RETENTION_MEMBERS = ("find_first_retained", "sinks")
SCORE_MEMBERS = ("score_rows", "num_queries", "prunes_during_decode", "repeats_prompt")


def list_reserved_words() -> set[str]:
    """List the words that a spec reads as something else than a registered codec."""
    from kvant.spec.formats import AUTO_WORD, FAMILY_WIDTHS, SIDE_FORMATS, TWO_WIDTH_FORMATS
    from kvant.spec.options import OPTION_PARSERS

    widths = (f"{family}{bits}" for family in FAMILY_WIDTHS for bits in ("", *range(10)))
    return {*SIDE_FORMATS, *TWO_WIDTH_FORMATS, *widths, *OPTION_PARSERS, AUTO_WORD.word}


def check_codec(name: str, codec_class: type[Codec]) -> None:
    """Raise unless a class can be the codec `name`."""
    codec = _check_class("codec", name, codec_class, Codec, CODEC_MEMBERS)
    if getattr(codec, "form", None) is not None:
        raise ExtensionError(
            f"the codec {name!r}: {codec_class.__name__} has form={codec.form!r}: kernels read the"
            " formats of kvant alone; set form = None"
        )


def check_score(name: str, score_class: type[Score]) -> None:
    """Raise unless a class can be the score `name`."""
    score = _check_class("score", name, score_class, Score, SCORE_MEMBERS)
    if score.name != name:
        raise ExtensionError(f"the score {name!r} names itself {score.name!r}: use one name")


def check_retention(name: str, retention_class: type[Retention]) -> None:
    """Raise unless a class can be the retention rule `name`."""
    rule = _check_class("retention", name, retention_class, Retention, RETENTION_MEMBERS)
    window, sinks = getattr(rule, "window", -1), rule.sinks
    is_window = window is None or (type(window) is int and window > 0)
    if not (is_window and type(sinks) is int and sinks >= 0):
        raise ExtensionError(
            f"the retention {name!r}: window={window!r} and sinks={sinks!r}: allowed are a whole"
            " number from 1, or None, and a whole number from 0"
        )
    for length in (0, 1, window or 1, 3 * (window or 1)):
        needed = 0 if window is None else max(0, length - window)
        if rule.find_first_retained(length) != needed:
            raise ExtensionError(
                f"the retention {name!r}: find_first_retained({length}) is"
                f" {rule.find_first_retained(length)!r}, and {needed} by its window: kernels read"
                " the window and the sinks alone"
            )


def _check_class(kind: str, name: str, given: Any, contract: type, members: tuple[str, ...]) -> Any:
    """Return an object of a class with these members; raise if it is no such class."""
    from kvant.spec.headers import check_round_trip

    way_out = f"kvant.types.{contract.__name__} describes one"
    subject = f"the {kind} {name!r}: {getattr(given, '__name__', given)}"
    own = vars(given) if isinstance(given, type) else {}
    if "__dataclass_fields__" not in own or not own["__dataclass_params__"].frozen:
        raise ExtensionError(f"{subject} is not a frozen dataclass: {way_out}")
    try:
        value = given()
        if value != given() or hash(value) != hash(given()):
            raise TypeError("two of them with equal fields differ")
        check_round_trip(value)
    except (TypeError, ValueError, NameError) as error:
        raise ExtensionError(
            f"{subject} cannot be made from its name and a file: {error}; it must be a frozen"
            f" dataclass whose fields have defaults and types that a file holds: {way_out}"
        ) from error
    missing = [member for member in members if getattr(value, member, None) is None]
    if missing:
        raise ExtensionError(f"{subject} has no {', '.join(missing)}: {way_out}")
    return value


CODEC_TABLE: ExtensionTable[type[Codec]] = ExtensionTable(
    "codec", CODECS, check_codec, NAME, list_reserved_words
)
SCORE_TABLE: ExtensionTable[type[Score]] = ExtensionTable("score", SCORES, check_score, NAME)
RETENTION_TABLE: ExtensionTable[type[Retention]] = ExtensionTable(
    "retention", RETENTIONS, check_retention, NAME
)
TABLES: dict[str, ExtensionTable[Any]] = {
    table.kind: table for table in (CODEC_TABLE, SCORE_TABLE, RETENTION_TABLE)
}


def register_codec(name: str, codec_class: type[Codec]) -> None:
    """Make a codec a format of specs and files under `name`; every field has a default.

    A name stands for one encoding for ever: files and stores name it, and hold its bytes.

    >>> from dataclasses import dataclass
    >>> from kvant.types import Codec, Field, Frame, Identity
    >>> @dataclass(frozen=True)
    ... class Half(Codec):
    ...     frame = Identity()
    ...     def fields(self, dim):
    ...         return {"rows": Field(torch.float16, dim)}
    ...     def seal(self, rows):
    ...         return {"rows": rows.to(torch.float16)}
    ...     def open(self, fields):
    ...         return fields["rows"].float()
    >>> kvant.register_codec("half", Half)
    >>> kvant.Cache(num_layers=2, spec="half,window=256")
    Cache(half,window=256,sinks=4: 2 layers, length 0, 0 B)
    """
    CODEC_TABLE.register(name, codec_class)


def register_score(name: str, score_class: type[Score]) -> None:
    """Make a score a choice of `prune=NAME:KEEP` and of files; every field has a default.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Newest(kvant.types.Score):
    ...     name = "newest"
    ...     def score_rows(self, rows):
    ...         return torch.arange(rows.valid.shape[1]).expand(rows.valid.shape)
    >>> kvant.register_score("newest", Newest)
    >>> kvant.Cache(num_layers=2, spec="affine8,prune=newest:25%")
    Cache(affine8,prune=newest:25%: 2 layers, length 0, 0 B)
    """
    SCORE_TABLE.register(name, score_class)


def register_retention(name: str, retention_class: type[Retention]) -> None:
    """Make a retention rule a choice of `retain=NAME` and of files; every field has a default.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Recent(kvant.types.Retention):
    ...     window = 1020
    ...     sinks = 4
    >>> kvant.register_retention("recent", Recent)
    >>> kvant.Cache(num_layers=2, spec="affine8,retain=recent")
    Cache(affine8,retain=recent: 2 layers, length 0, 0 B)
    """
    RETENTION_TABLE.register(name, retention_class)
