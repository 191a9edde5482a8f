"""What is wrong with what was typed, as far as it can be known before a model is loaded."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvant.cache.files import Header, header
from kvant.checkpoints import config_file
from kvant.errors import CacheError, CacheFileError
from kvant.models import layer_shapes
from kvant.spec import parse

Rows = tuple[int, int]  # heads of keys, channels of each


def check_readable(path: Path, flag: str) -> None:
    if not path.is_file():
        raise ValueError(f"{flag} {path}: there is no such file")


def check_writable(path: Path, flag: str) -> None:
    """Said before the work, and not after it."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: the name of a file in a folder that exists is needed")


def read_text(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{flag} {path} cannot be read: it is no text in UTF-8") from None
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read: {error.strerror}") from error


def checked_text(text: str, where: str) -> str:
    """Bytes that are no text come as lone surrogates, and no tokenizer takes them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where} is no text in UTF-8") from None
    return text


def check_spec(spec: str) -> None:
    """A spec of any number of layers; what `auto` is, only a model tells."""
    from kvant.probing import Tolerance, auto_size, auto_tolerance, is_auto

    if is_auto(spec):
        auto_size(spec)
        auto_tolerance(spec, Tolerance())
    else:
        parse(spec, 1)


def check_drawing(drawn: Mapping[str, Any], **limits: int | None) -> None:
    """How tokens are drawn, and how many."""
    from kvant.generation import Sampling
    from kvant.generation.loop import Limits

    Sampling(**drawn)
    Limits(**limits)  # type: ignore[arg-type]


def check_saved(path: Path, model: str | None) -> None:
    """A whole file with a conversation in it, of a model of this shape where a folder tells it.

    The weights may still be others: that is found when they are there.
    """
    from kvant.generation.conversation import Transcript

    check_readable(path, "--load")
    head = header(path)
    Transcript.of(path, head.about)
    found, own = _rows(head), _model_rows(model)
    if own is not None and found != own:
        raise CacheFileError(
            f"--load {path}: a conversation with another model: it holds {_words(found)}, and "
            f"--model has {_words(own)}"
        )


def _rows(head: Header) -> list[Rows]:
    """Of the layers that keep any."""
    return [
        (tensor.shape[1], tensor.shape[2])
        for index in range(len(head.spec.layers))
        for name, tensor in head.tensors.items()
        if name.startswith(f"{index}/") and name.endswith("keys.open")
    ]


def _model_rows(model: str | None) -> list[Rows] | None:
    """None where only the model itself can tell."""
    file = config_file(model)
    try:
        told = None if file is None else json.loads(file.read_text(encoding="utf-8"))
        shapes = None if told is None else layer_shapes(told)
    except (CacheError, OSError, ValueError):  # loading it says why, or knows more
        return None
    return (
        None if shapes is None else [(one.num_heads, one.key_dim) for one in shapes if one.attends]
    )


def _words(rows: Iterable[Rows]) -> str:
    """28 layers of 8 heads of 128"""
    counted = Counter(rows)
    told = [f"{count} layers of {heads} heads of {dim}" for (heads, dim), count in counted.items()]
    return " and ".join(told) or "no rows"
