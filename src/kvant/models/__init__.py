"""The cached layers of a model, from its configuration alone.

`layer_shapes` reads a config.json (a mapping), a configuration object or a model. It loads no
weights and does not import transformers. Unknown values are explicit: a state of unknown size is
None, and a layer kind that only transformers understands has no rows. Tables of the names that
model families use are in families.py.
"""

from __future__ import annotations

from typing import Any

import torch

from kvant.models.families import (
    CONFIG_NAMES,
    ConfigEntries,
    check_positive,
    count_state_nbytes,
    find_layer_kinds,
    parse_dtype,
    read_row_sizes,
    read_window,
)
from kvant.models.shapes import (
    ATTENTION_KINDS,
    CHUNKED,
    EMPTY,
    RECURRENT_KINDS,
    WINDOWED_KINDS,
    LayerShape,
)
from kvant.spec.formats import MAX_LAYERS

__all__ = ["ConfigEntries", "declares_dtype", "layer_shapes", "max_context"]


ATTENTIONS_PER_LAYER = {"longcat_flash": 2}  # attention layers per layer of the configuration


def layer_shapes(model: Any) -> tuple[LayerShape, ...]:
    """Return one shape per layer of the decoder of a model; encoders are omitted."""
    entries = ConfigEntries.from_model(model)
    dtype = parse_dtype(_read_declared_dtype(model, entries))
    kinds = find_layer_kinds(entries, _count_layers(entries))
    return tuple(
        _make_layer_shape(entries.get_layer(i), kind, i, dtype) for i, kind in enumerate(kinds)
    )


def _count_layers(entries: ConfigEntries) -> int:
    count = entries.get(*CONFIG_NAMES["layers"])
    kinds = entries.get("layer_types", "layers_block_type")
    if count is None and kinds:
        count = len(kinds)
    count = check_positive(count, "layers")
    if entries.get("num_hidden_layers") is None:
        count *= ATTENTIONS_PER_LAYER.get(str(entries.get("model_type")), 1)
    if count > MAX_LAYERS:
        raise ValueError(f"layers = {count}: {MAX_LAYERS} at most")
    return count


def declares_dtype(model: Any) -> bool:
    """Return whether the dtype is declared; else bfloat16 is assumed, as for most models."""
    return _read_declared_dtype(model, ConfigEntries.from_model(model)) is not None


def max_context(model: Any) -> int | None:
    """Return the context length that the model declares, or None."""
    value = ConfigEntries.from_model(model).get_anywhere(*CONFIG_NAMES["context"])
    return value if type(value) is int and value > 0 else None


def _make_layer_shape(
    entries: ConfigEntries, kind: str, index: int, dtype: torch.dtype
) -> LayerShape:
    attends, recurs = kind in ATTENTION_KINDS, kind in RECURRENT_KINDS
    sizes: dict[str, Any] = read_row_sizes(entries, kind, index) if attends else {}
    if kind in WINDOWED_KINDS:
        sizes["window"] = read_window(entries)
    elif kind == CHUNKED:
        sizes["window"] = entries.get_int("attention_chunk_size")
    if recurs:
        sizes["state_nbytes"] = count_state_nbytes(entries, kind, dtype.itemsize)
    elif not attends and kind != EMPTY:
        sizes["state_nbytes"] = None
    return LayerShape(kind=kind, dtype=dtype, **sizes)


def _read_declared_dtype(model: Any, entries: ConfigEntries) -> Any:
    """Return the dtype of a loaded model, or else that of its configuration."""
    loaded_dtype = getattr(model, "dtype", None) if hasattr(model, "config") else None
    return (
        loaded_dtype
        if isinstance(loaded_dtype, torch.dtype)
        else entries.get_anywhere(*CONFIG_NAMES["dtype"])
    )
