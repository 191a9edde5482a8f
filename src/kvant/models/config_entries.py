"""Lookup of entries in a model configuration, by the names that configurations use.

A configuration is a mapping (a config.json) or an object with attributes; a model has one. This
module does not interpret the names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

NESTED_CONFIGS = ("decoder", "text_config", "llm_config", "language_config")  # of the decoder

# Entries that a config.json of these families omits, by the defaults of their configuration class.
CONFIG_DEFAULTS: dict[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    },
    "gemma4_text": {"global_head_dim": 512},
    "gemma4_unified_text": {"global_head_dim": 512},
    "gpt_bigcode": {"multi_query": True},
    "lfm2": {"conv_L_cache": 3},
}


@dataclass(frozen=True)
class ConfigEntries:
    """The entries of a decoder, or of one of its layers; earlier sources have priority."""

    sources: tuple[Any, ...]
    outer: ConfigEntries | None = None  # of the model that contains the decoder

    @classmethod
    def from_model(cls, model: Any) -> ConfigEntries:
        """Return the decoder entries of a configuration, or of a model that has one."""
        config = getattr(model, "config", model)
        if not _is_config(config):
            raise ValueError(f"{short(model)} is not a Shape, a configuration or a model")
        entries = cls((config,))
        while _is_config(nested := entries.get(*NESTED_CONFIGS)):
            entries = cls((nested,), outer=entries)
        defaults = CONFIG_DEFAULTS.get(str(entries.get("model_type")), {})
        return cls((*entries.sources, defaults), entries.outer)

    def get(self, *names: str) -> Any:
        """Return the value of the first of `names` that is set, or None."""
        for name in names:
            for source in self.sources:
                value = _read_value(source, name)
                if value is not None:
                    return value
        return None

    def get_anywhere(self, *names: str) -> Any:
        """Return `get` of the decoder, or else of the containing model."""
        value = self.get(*names)
        return self.outer.get_anywhere(*names) if value is None and self.outer else value

    def get_int(self, *names: str) -> int | None:
        """Return `get` if it is an integer; None for words such as "auto"."""
        value = self.get(*names)
        return value if type(value) is int else None

    def get_ints(self, *groups: tuple[str, ...]) -> tuple[int, ...] | None:
        """Return the integers of the first group whose names are all set."""
        for names in groups:
            values = [number for name in names if (number := self.get_int(name)) is not None]
            if len(values) == len(names):
                return tuple(values)
        return None

    def get_entries(self, name: str) -> ConfigEntries:
        """Return the entries nested in an entry, possibly none."""
        value = self.get(name)
        return ConfigEntries((value,) if _is_config(value) else ())

    def get_layer(self, index: int) -> ConfigEntries:
        """Return the entries of one layer: those of `per_layer_config` have priority."""
        per_layer = self.get("per_layer_config")
        if isinstance(per_layer, Mapping):
            layer_config = per_layer.get(str(index), per_layer.get(index))
        else:
            layer_config = (
                per_layer[index]
                if isinstance(per_layer, Sequence) and index < len(per_layer)
                else None
            )
        return (
            self
            if layer_config is None
            else ConfigEntries((layer_config, *self.sources), self.outer)
        )


def _is_config(config: Any) -> bool:
    return isinstance(config, Mapping) or hasattr(config, "__dict__")


def _read_value(source: Any, name: str) -> Any:
    if isinstance(source, Mapping):
        return source.get(name)
    try:
        return getattr(source, name, None)
    except RuntimeError:  # transformers raises for entries that differ by layer
        return None
