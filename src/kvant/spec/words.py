"""A cache in a few words, for people: less than a spec says."""

from __future__ import annotations

from kvant.recipes import CacheSpec, attention_in
from kvant.spec.formats import spelled


def words(spec: CacheSpec) -> str:
    """The formats of its layers, and what stays of the widest one."""
    layers = list(attention_in(*spec.layers))
    if not layers:
        return ""
    told = " and ".join(dict.fromkeys(spelled(*layer.sides.values()) for layer in layers))
    kept = max(layers, key=lambda layer: layer.width).retention
    if kept.window is None:
        return told
    return f"{told},window={kept.window}" + (f",sinks={kept.sinks}" if kept.sinks else "")
