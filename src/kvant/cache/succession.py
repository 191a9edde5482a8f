"""The recipe of each layer after a recode: what is asked, within what a layer cannot change.

What is no attention stays as it is, and so does whatever follows from the model: values inside the
keys, and the dtype that rows are stored in unless another is asked for. Knows recipes only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvant.errors import SpecError
from kvant.recipes import CacheSpec, GroupSpec, LayerSpec, Recipe, attention_in

Meet = Callable[[LayerSpec, LayerSpec], LayerSpec]  # (present, asked) -> the one after


def attending(spec: CacheSpec) -> list[int]:
    """The layers that a recode concerns."""
    return [index for index, recipe in enumerate(spec.layers) if any(attention_in(recipe))]


def succeeding(present: CacheSpec, asked: CacheSpec) -> CacheSpec:
    """Every attention layer as it is asked for, or an error."""
    return _met(present, asked, _exactly)


def within(present: CacheSpec, asked: CacheSpec) -> CacheSpec:
    """What one recipe for all layers comes to: as a rule, a narrower window that is there stays.

    Where no window is asked for, each layer keeps its own retention. Where layers differ in it,
    those narrower than the widest have that from the model, and keep it too.
    """
    widest = max((layer.width for layer in attention_in(*present.layers)), default=0.0)

    def meet(old: LayerSpec, new: LayerSpec) -> LayerSpec:
        window = old.retention.window
        from_model = old.width < widest and old.width <= new.width
        if window is not None and (new.retention.window is None or from_model):
            new = replace(new, retention=old.retention)
        return replace(new, chunk=old.chunk, value_dim=old.value_dim)

    return _met(present, asked, meet)


def _exactly(old: LayerSpec, new: LayerSpec) -> LayerSpec:
    if old.value_dim != new.value_dim:
        raise SpecError(
            f"value_dim={new.value_dim} for rows that were stored with value_dim={old.value_dim}: "
            "a recode keeps the rows, so it has to stay"
        )
    return replace(new, dtype=new.dtype or old.dtype)


def _met(present: CacheSpec, asked: CacheSpec, meet: Meet) -> CacheSpec:
    layers = []
    for index, (old, new) in enumerate(zip(present.layers, asked.layers, strict=True)):
        try:
            layers.append(_one(old, new, meet))
        except SpecError as error:
            raise SpecError(f"layer {index}: {error}") from None
    return CacheSpec(tuple(layers))


def _one(old: Recipe, new: Recipe, meet: Meet) -> Any:
    if isinstance(old, LayerSpec) and isinstance(new, LayerSpec):
        return meet(old, new)
    if isinstance(old, GroupSpec) and isinstance(new, LayerSpec):
        new = GroupSpec(tuple((n, new if any(attention_in(p)) else p) for n, p in old.parts))
    if type(old) is not type(new):
        raise SpecError(f"{new} for a layer of {old}: a recode keeps the kind of a layer")
    if not (isinstance(old, GroupSpec) and isinstance(new, GroupSpec)):
        return old
    told = dict(new.parts)
    if told.keys() != dict(old.parts).keys():
        raise SpecError(f"parts {sorted(told)} for a layer of {sorted(dict(old.parts))}")
    return GroupSpec(tuple((name, _one(part, told[name], meet)) for name, part in old.parts))
