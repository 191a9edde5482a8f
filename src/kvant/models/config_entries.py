"""What a configuration says, by the names that configurations use.

A configuration is a mapping (a config.json) or an object with attributes; a model has one. Nothing
here knows what a name means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

NESTED_CONFIGS = (
    "decoder",
    "text_config",
    "llm_config",
    "language_config",
)  # where the decoder is told

# What the config.json of these leaves to the class that reads it.
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
    """What is told of a decoder, or of one of its layers; the first source that tells counts."""

    sources: tuple[Any, ...]
    outer: ConfigEntries | None = None  # of the model that the decoder is a part of

    @classmethod
    def from_model(cls, model: Any) -> ConfigEntries:
        """Of a configuration (a mapping, or an object), or of a model that has one."""
        config = getattr(model, "config", model)
        if not _is_config(config):
            raise ValueError(f"{short(model)} is no Shape, no configuration and no model")
        found = cls((config,))
        while _is_config(nested := found.get(*NESTED_CONFIGS)):
            found = cls((nested,), outer=found)
        defaults = CONFIG_DEFAULTS.get(str(found.get("model_type")), {})
        return cls((*found.sources, defaults), found.outer)

    def get(self, *names: str) -> Any:
        """The first of these names that is told, or None."""
        for name in names:
            for source in self.sources:
                value = _read_value(source, name)
                if value is not None:
                    return value
        return None

    def get_anywhere(self, *names: str) -> Any:
        """The same, asking the whole model where the decoder does not tell."""
        value = self.get(*names)
        return self.outer.get_anywhere(*names) if value is None and self.outer else value

    def get_int(self, *names: str) -> int | None:
        """The same, of names that mean a number: words like "auto" tell nothing."""
        value = self.get(*names)
        return value if type(value) is int else None

    def get_ints(self, *groups: tuple[str, ...]) -> tuple[int, ...] | None:
        """The first group of names that are all told."""
        for names in groups:
            found = [number for name in names if (number := self.get_int(name)) is not None]
            if len(found) == len(names):
                return tuple(found)
        return None

    def get_entries(self, name: str) -> ConfigEntries:
        """The entries of an entry; none, where it has none."""
        value = self.get(name)
        return ConfigEntries((value,) if _is_config(value) else ())

    def get_layer(self, index: int) -> ConfigEntries:
        """What counts for one layer: where it differs from the others, that is told apart."""
        apart = self.get("per_layer_config")
        if isinstance(apart, Mapping):
            own = apart.get(str(index), apart.get(index))
        else:
            own = apart[index] if isinstance(apart, Sequence) and index < len(apart) else None
        return self if own is None else ConfigEntries((own, *self.sources), self.outer)


def _is_config(config: Any) -> bool:
    return isinstance(config, Mapping) or hasattr(config, "__dict__")


def _read_value(source: Any, name: str) -> Any:
    if isinstance(source, Mapping):
        return source.get(name)
    try:
        return getattr(source, name, None)
    except RuntimeError:  # transformers refuses to say for all layers what differs by layer
        return None
