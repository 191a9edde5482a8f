"""The layers of a model, from its configuration alone.

`layer_shapes` reads what is in a config.json (a mapping), a configuration object or a model; it
loads nothing and imports no host. What it cannot tell is said in the shape: a state of unknown
size is None, and a kind that only its host understands has no rows. Families differ by the names
that they use: those are tables in families.py.
"""

from __future__ import annotations

from typing import Any

import torch

from kvant.models.entries import Entries
from kvant.models.families import NAMES, dtype_of, kinds, positive, rows, state_nbytes, window
from kvant.models.shapes import ATTENDING, CHUNKED, EMPTY, RECURRING, WINDOWED, LayerShape
from kvant.spec.formats import MAX_LAYERS

__all__ = ["Entries", "layer_shapes", "max_context", "says_dtype"]


ATTENTIONS = {"longcat_flash": 2}  # how many stand in what a file calls a layer


def layer_shapes(model: Any) -> tuple[LayerShape, ...]:
    """One shape a layer, of the decoder of a model; an encoder is left out."""
    entries = Entries.of(model)
    dtype = _dtype(model, entries)
    found = kinds(entries, _count(entries))
    return tuple(_shape(entries.layer(i), kind, i, dtype) for i, kind in enumerate(found))


def _count(entries: Entries) -> int:
    count, kinds = entries.get(*NAMES["layers"]), entries.get("layer_types", "layers_block_type")
    if count is None and kinds:
        count = len(kinds)
    count = positive(count, "layers")
    if entries.get("num_hidden_layers") is None:
        count *= ATTENTIONS.get(str(entries.get("model_type")), 1)
    if count > MAX_LAYERS:
        raise ValueError(f"layers = {count}: {MAX_LAYERS} at most")
    return count


def says_dtype(model: Any) -> bool:
    """Does it tell what its rows come in? Else bfloat16 is assumed, as most are stored."""
    return _told_dtype(model, Entries.of(model)) is not None


def max_context(model: Any) -> int | None:
    """The longest text that the model was made for, where its configuration tells."""
    value = Entries.of(model).anywhere(*NAMES["context"])
    return value if type(value) is int and value > 0 else None


def _shape(entries: Entries, kind: str, index: int, dtype: torch.dtype) -> LayerShape:
    attends, recurs = kind in ATTENDING, kind in RECURRING
    told: dict[str, Any] = rows(entries, kind, index) if attends else {}
    if kind in WINDOWED:
        told["window"] = window(entries)
    elif kind == CHUNKED:
        told["window"] = entries.number("attention_chunk_size")
    if recurs:
        told["state_nbytes"] = state_nbytes(entries, kind, dtype.itemsize)
    elif not attends and kind != EMPTY:
        told["state_nbytes"] = None
    return LayerShape(kind=kind, dtype=dtype, **told)


def _dtype(model: Any, entries: Entries) -> torch.dtype:
    return dtype_of(_told_dtype(model, entries))


def _told_dtype(model: Any, entries: Entries) -> Any:
    """A model knows best what its rows come in; a configuration only says what it was made in."""
    own = getattr(model, "dtype", None) if hasattr(model, "config") else None
    return own if isinstance(own, torch.dtype) else entries.anywhere(*NAMES["dtype"])
