"""The spec language: one string, or one JSON object, names the recipe of every layer.

    spec := format ("," option)*

The words are read in formats.py and options.py, JSON in headers.py; here they become recipes,
which are checked the same way wherever they come from. Anything unknown, doubled or contradictory
is a SpecError with what was read, what is allowed and the nearest that is valid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from reprlib import repr as short
from typing import Any, NamedTuple

from kvant.contracts import Retention
from kvant.errors import SpecError
from kvant.recipes import (
    RECIPES_BY_KIND,
    AnySpec,
    CacheSpec,
    EmptySpec,
    GroupSpec,
    LayerSpec,
    Recipe,
    RecurrentSpec,
    SharedSpec,
    iterate_attention,
)
from kvant.retention import DEFAULT_WINDOW_SINKS, KeepAll, Window
from kvant.spec.formats import MAX_LAYERS, CodecOptions, LayerFormat, format_codecs, parse_format
from kvant.spec.options import (
    ADAPTIVE,
    MAX_OPTION_VALUE,
    OPTION_PARSERS,
    check_capacity,
    check_options,
    parse_options,
)

OPTION_FIELDS = {
    name: name for name in ("tail", "page", "slack", "prefill", "step", "capacity", "prune")
}
OPTION_FIELDS["start"] = "dense_until"  # option: field of a LayerSpec
MIN_VALUES = dict.fromkeys(
    ("page", "step", "capacity", "chunk", "value_dim", "window", "max_checkpoints"), 1
)  # others may be 0; that pages are multiples of 64 is asked of text only
Recipes = Sequence[Recipe]


def as_spec(spec: AnySpec, num_layers: int | None) -> CacheSpec:
    """A spec of `num_layers` layers; a LayerSpec serves all of them as it is."""
    if isinstance(spec, CacheSpec) and num_layers is None:
        return check_spec(spec)
    if num_layers is None:
        raise SpecError("num_layers is needed: only a CacheSpec says how many layers there are")
    if isinstance(spec, str):
        return parse(spec, num_layers)
    if isinstance(spec, LayerSpec):
        spec = CacheSpec((spec,) * num_layers)
    if not isinstance(spec, CacheSpec):
        raise SpecError(f"{short(spec)} is no spec; allowed: a string, a LayerSpec, a CacheSpec")
    if len(spec.layers) != num_layers:
        raise SpecError(
            f"the spec has {len(spec.layers)} layers, the cache {num_layers};"
            f" nearest: a CacheSpec of {num_layers} layers, or one LayerSpec for all"
        )
    return check_spec(spec)


def parse(text: str, num_layers: int) -> CacheSpec:
    """The recipe of each of `num_layers` layers, from a string such as "affine4,window=4096".

    >>> spec = kvant.parse("affine4,window=4096", num_layers=32)
    >>> len(spec.layers), spec.layers[0].retention
    (32, Window(window=4096, sinks=4))
    """
    if not 1 <= num_layers <= MAX_LAYERS:
        raise SpecError(f"num_layers={num_layers}: allowed is 1 to {MAX_LAYERS}; nearest: 1")
    main, edge, count, options = read_words(text)
    choice = CodecOptions(
        options.get("group"), "rotate" in options, "smooth" in options, options.get("seed", 0)
    )
    layers = []
    for layer in range(num_layers):
        at_edge = min(layer, num_layers - 1 - layer) < count
        layers.append(make_recipe(edge if at_edge else main, options, choice, layer))
    return check_spec(CacheSpec(tuple(layers)))


class Words(NamedTuple):
    """The words of a spec, read and checked."""

    main: LayerFormat
    edge: LayerFormat
    edge_layers: int  # at each end, which are stored in `edge`
    options: Mapping[str, Any]


def check_words(text: str) -> None:
    """Refuse a spec with a wrong word. It builds no codec, so it needs no torch."""
    read_words(text)


def read_words(text: str) -> Words:
    first, *rest = (word.strip() for word in text.split(","))
    if first.partition("=")[0] in OPTION_PARSERS:
        raise SpecError(
            f"spec {short(text)} has no format; allowed: a format, then options;"
            f" nearest: affine8,{short(first)[1:-1]}"
        )
    main = parse_format(first)
    options = parse_options(rest)
    count, other = options.pop("edge", (0, main))
    check_options(options, (main, other) if count else (main,))
    check_capacity(options)
    return Words(main, other, count, options)


def split_specs(text: str) -> list[str]:
    """Specs from one text: "raw,step=1,affine8" is two, for an option belongs to its format."""
    found: list[str] = []
    for word in (part.strip() for part in text.split(",")):
        if found and ("=" in word or word in OPTION_PARSERS):
            found[-1] += f",{word}"
        else:
            found.append(word)
    return found


def make_recipe(
    layer_format: LayerFormat, options: Mapping[str, Any], codec_options: CodecOptions, layer: int
) -> LayerSpec:
    keys, values = layer_format.make_codecs(codec_options, layer)
    retention: Retention = KeepAll(options.get("sinks", 0))
    if "window" in options:
        retention = Window(options["window"], options.get("sinks", DEFAULT_WINDOW_SINKS))
    selection, first = options.get("select", (None, 0))
    selection = selection if layer >= first else None
    layer_spec = LayerSpec(keys, values, retention, dtype=layer_format.dtype, select=selection)
    return replace(
        layer_spec, **{OPTION_FIELDS[n]: options[n] for n in OPTION_FIELDS if n in options}
    )


def check_spec(spec: CacheSpec) -> CacheSpec:
    """`spec`, if its numbers make sense and its layers fit together."""
    if len(spec.layers) > MAX_LAYERS:
        raise SpecError(f"the spec has {len(spec.layers)} layers; allowed: at most {MAX_LAYERS}")
    before: list[Recipe] = []
    for index, layer in enumerate(spec.layers):
        if type(layer) not in CHECKS:
            raise SpecError(
                f"layers[{index}] is {short(layer)}; allowed: {', '.join(RECIPES_BY_KIND)}"
            )
        CHECKS[type(layer)](layer, f"layers[{index}]", before)
        before.append(layer)
    return spec


def check_layer(layer: LayerSpec, path: str, previous: Recipes) -> None:
    check_numbers(layer, path, "page tail slack dense_until step capacity chunk value_dim")
    check_numbers(layer.retention, f"{path}.retention", "window sinks")
    if layer.select is not None:
        check_numbers(layer.select, f"{path}.select", "pages")
    if layer.prune is not None:
        check_numbers(layer.prune, f"{path}.prune", "rows")
        if (
            layer.effective_window < math.inf
            or layer.retention.sinks
            or layer.chunk
            or layer.value_dim
        ):
            raise SpecError(
                f"{path}.prune beside a window, sinks, a chunk or values inside the keys;"
                " allowed: a layer that keeps every row and sees it; nearest: no prune"
            )
    if layer.dtype is not None:
        check_dtype(layer.dtype, path)


def check_dtype(dtype: Any, where: str) -> None:
    from kvant.dtypes import DTYPES

    if dtype not in DTYPES.values():
        raise SpecError(f"{where}.dtype is {dtype}; allowed: {', '.join(DTYPES)}; nearest: float32")


def check_fitted(spec: CacheSpec) -> CacheSpec:
    """`spec`, if it needs no model to tell it more."""
    from kvant.codecs.frames import SmoothPlaceholder, needs_fitting

    for layer in iterate_attention(*spec.layers):
        if any(needs_fitting(codec.frame) for codec in layer.sides.values()):
            SmoothPlaceholder().refuse()
    return spec


def check_recurrent(layer: RecurrentSpec, path: str, previous: Recipes) -> None:
    check_numbers(layer, path, "max_checkpoints")


def check_parts(layer: GroupSpec, path: str, previous: Recipes) -> None:
    names = [name for name, _ in layer.parts]
    if not names or len(set(names)) < len(names) or any("/" in name for name in names):
        raise SpecError(
            f"{path}.parts is {short(names)}; allowed: names that all differ, without a slash"
        )
    for name, part in layer.parts:
        CHECKS[type(part)](part, f"{path}.{short(name)}", previous)


def check_shared(layer: SharedSpec, path: str, previous: Recipes) -> None:
    if not 0 <= layer.layer < len(previous) or isinstance(previous[layer.layer], EmptySpec):
        near = min(max(layer.layer, 0), len(previous) - 1) if previous else "a recipe of its own"
        raise SpecError(
            f"{path}.layer is {short(layer.layer)}; allowed: layers before it; nearest: {near}"
        )


def check_empty(layer: EmptySpec, path: str, previous: Recipes) -> None:
    """Nothing is said, so nothing is wrong."""


def check_numbers(owner: object, path: str, names: str) -> None:
    for name in names.split():
        value, least = getattr(owner, name), MIN_VALUES.get(name, 0)
        if value is not None and not least <= value <= MAX_OPTION_VALUE:
            near = min(max(value, least), MAX_OPTION_VALUE)
            raise SpecError(
                f"{path}.{name} is {short(value)}; allowed: {least} to {MAX_OPTION_VALUE};"
                f" nearest: {near}"
            )


CHECKS: dict[type, Callable[[Any, str, Recipes], None]] = {
    LayerSpec: check_layer,
    RecurrentSpec: check_recurrent,
    GroupSpec: check_parts,
    SharedSpec: check_shared,
    EmptySpec: check_empty,
}


def to_json(spec: CacheSpec) -> str:
    """`spec` as one line of JSON, for the header of a file."""
    from kvant.spec.headers import dumps

    return dumps(check_spec(spec))


def from_json(text: str) -> CacheSpec:
    """The spec of a header that nobody vouches for."""
    from kvant.spec.headers import loads

    return check_spec(loads(text))


def describe_spec(spec: CacheSpec) -> str:
    """The formats of its layers, what stays of the widest one, and what tokens read of it."""
    layers = list(iterate_attention(*spec.layers))
    if not layers:
        return ""
    told = " and ".join(dict.fromkeys(format_codecs(*layer.sides.values()) for layer in layers))
    kept = max(layers, key=lambda layer: layer.effective_window).retention
    if kept.window is not None:
        told += f",window={kept.window}"
    if kept.window is not None or kept.sinks:  # 0 as well: a window alone has WINDOW_SINKS
        told += f",sinks={kept.sinks}"
    some = next((layer.select for layer in layers if layer.select is not None), None)
    if some is not None:
        told += f",select={some.pages or f'{some.percent:g}%'}"
    rule = next((layer.prune for layer in layers if layer.prune is not None), None)
    if rule is not None:
        told += f",prune={rule.score.name}:{rule.rows or f'{rule.percent:g}%'}"
        told += f":{ADAPTIVE}" if rule.adaptive else ""
    return told
