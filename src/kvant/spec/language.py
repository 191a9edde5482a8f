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
    KINDS,
    AnySpec,
    CacheSpec,
    EmptySpec,
    GroupSpec,
    LayerSpec,
    Recipe,
    RecurrentSpec,
    SharedSpec,
    attention_in,
)
from kvant.retention import WINDOW_SINKS, All, Window
from kvant.spec.formats import MAX_LAYERS, Choice, Format, parse_format, spelled
from kvant.spec.options import (
    ADAPTIVE,
    MAX_NUMBER,
    OPTIONS,
    check_choice,
    check_room,
    parse_options,
)

FIELDS = {name: name for name in ("tail", "page", "slack", "prefill", "step", "capacity", "prune")}
FIELDS["start"] = "dense_until"  # option: field of a LayerSpec
LEAST = dict.fromkeys(
    ("page", "step", "capacity", "chunk", "value_dim", "window", "max_checkpoints"), 1
)  # others may be 0; that pages are multiples of 64 is asked of text only
Layers = Sequence[Recipe]


def as_spec(spec: AnySpec, num_layers: int | None) -> CacheSpec:
    """A spec of `num_layers` layers; a LayerSpec serves all of them as it is."""
    if isinstance(spec, CacheSpec) and num_layers is None:
        return checked(spec)
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
    return checked(spec)


def parse(text: str, num_layers: int) -> CacheSpec:
    """The recipe of each of `num_layers` layers, from a string such as "affine4,window=4096".

    >>> spec = kvant.parse("affine4,window=4096", num_layers=32)
    >>> len(spec.layers), spec.layers[0].retention
    (32, Window(window=4096, sinks=4))
    """
    if not 1 <= num_layers <= MAX_LAYERS:
        raise SpecError(f"num_layers={num_layers}: allowed is 1 to {MAX_LAYERS}; nearest: 1")
    main, edge, count, options = read_words(text)
    choice = Choice(
        options.get("group"), "rotate" in options, "smooth" in options, options.get("seed", 0)
    )
    layers = []
    for layer in range(num_layers):
        at_edge = min(layer, num_layers - 1 - layer) < count
        layers.append(recipe(edge if at_edge else main, options, choice, layer))
    return checked(CacheSpec(tuple(layers)))


class Words(NamedTuple):
    """The words of a spec, read and checked."""

    main: Format
    edge: Format
    edge_layers: int  # at each end, which are stored in `edge`
    options: Mapping[str, Any]


def check_words(text: str) -> None:
    """Refuse a spec with a wrong word. It builds no codec, so it needs no torch."""
    read_words(text)


def read_words(text: str) -> Words:
    first, *rest = (word.strip() for word in text.split(","))
    if first.partition("=")[0] in OPTIONS:
        raise SpecError(
            f"spec {short(text)} has no format; allowed: a format, then options;"
            f" nearest: affine8,{short(first)[1:-1]}"
        )
    main = parse_format(first)
    options = parse_options(rest)
    count, other = options.pop("edge", (0, main))
    check_choice(options, (main, other) if count else (main,))
    check_room(options)
    return Words(main, other, count, options)


def split(formats: str) -> list[str]:
    """Specs from one text: "raw,step=1,affine8" is two, for an option belongs to its format."""
    found: list[str] = []
    for word in (part.strip() for part in formats.split(",")):
        if found and ("=" in word or word in OPTIONS):
            found[-1] += f",{word}"
        else:
            found.append(word)
    return found


def recipe(form: Format, options: Mapping[str, Any], choice: Choice, layer: int) -> LayerSpec:
    keys, values = form.codecs(choice, layer)
    retention: Retention = All(options.get("sinks", 0))
    if "window" in options:
        retention = Window(options["window"], options.get("sinks", WINDOW_SINKS))
    selection, first = options.get("select", (None, 0))
    selection = selection if layer >= first else None
    layer_spec = LayerSpec(keys, values, retention, dtype=form.dtype, select=selection)
    return replace(layer_spec, **{FIELDS[n]: options[n] for n in FIELDS if n in options})


def checked(spec: CacheSpec) -> CacheSpec:
    """`spec`, if its numbers make sense and its layers fit together."""
    if len(spec.layers) > MAX_LAYERS:
        raise SpecError(f"the spec has {len(spec.layers)} layers; allowed: at most {MAX_LAYERS}")
    before: list[Recipe] = []
    for index, layer in enumerate(spec.layers):
        if type(layer) not in CHECKS:
            raise SpecError(f"layers[{index}] is {short(layer)}; allowed: {', '.join(KINDS)}")
        CHECKS[type(layer)](layer, f"layers[{index}]", before)
        before.append(layer)
    return spec


def check_layer(layer: LayerSpec, where: str, before: Layers) -> None:
    check_numbers(layer, where, "page tail slack dense_until step capacity chunk value_dim")
    check_numbers(layer.retention, f"{where}.retention", "window sinks")
    if layer.select is not None:
        check_numbers(layer.select, f"{where}.select", "pages")
    if layer.prune is not None:
        check_numbers(layer.prune, f"{where}.prune", "rows")
        if layer.width < math.inf or layer.retention.sinks or layer.chunk or layer.value_dim:
            raise SpecError(
                f"{where}.prune beside a window, sinks, a chunk or values inside the keys;"
                " allowed: a layer that keeps every row and sees it; nearest: no prune"
            )
    if layer.dtype is not None:
        check_dtype(layer.dtype, where)


def check_dtype(dtype: Any, where: str) -> None:
    from kvant.dtypes import DTYPES

    if dtype not in DTYPES.values():
        raise SpecError(f"{where}.dtype is {dtype}; allowed: {', '.join(DTYPES)}; nearest: float32")


def check_fitted(spec: CacheSpec) -> CacheSpec:
    """`spec`, if it needs no model to tell it more."""
    from kvant.codecs.frames import Smooth, waits

    for layer in attention_in(*spec.layers):
        if any(waits(codec.frame) for codec in layer.sides.values()):
            Smooth().refuse()
    return spec


def check_recurrent(layer: RecurrentSpec, where: str, before: Layers) -> None:
    check_numbers(layer, where, "max_checkpoints")


def check_parts(layer: GroupSpec, where: str, before: Layers) -> None:
    names = [name for name, _ in layer.parts]
    if not names or len(set(names)) < len(names) or any("/" in name for name in names):
        raise SpecError(
            f"{where}.parts is {short(names)}; allowed: names that all differ, without a slash"
        )
    for name, part in layer.parts:
        CHECKS[type(part)](part, f"{where}.{short(name)}", before)


def check_shared(layer: SharedSpec, where: str, before: Layers) -> None:
    if not 0 <= layer.layer < len(before) or isinstance(before[layer.layer], EmptySpec):
        near = min(max(layer.layer, 0), len(before) - 1) if before else "a recipe of its own"
        raise SpecError(
            f"{where}.layer is {short(layer.layer)}; allowed: layers before it; nearest: {near}"
        )


def check_empty(layer: EmptySpec, where: str, before: Layers) -> None:
    """Nothing is said, so nothing is wrong."""


def check_numbers(holder: object, where: str, names: str) -> None:
    for name in names.split():
        value, least = getattr(holder, name), LEAST.get(name, 0)
        if value is not None and not least <= value <= MAX_NUMBER:
            near = min(max(value, least), MAX_NUMBER)
            raise SpecError(
                f"{where}.{name} is {short(value)}; allowed: {least} to {MAX_NUMBER};"
                f" nearest: {near}"
            )


CHECKS: dict[type, Callable[[Any, str, Layers], None]] = {
    LayerSpec: check_layer,
    RecurrentSpec: check_recurrent,
    GroupSpec: check_parts,
    SharedSpec: check_shared,
    EmptySpec: check_empty,
}


def to_json(spec: CacheSpec) -> str:
    """`spec` as one line of JSON, for the header of a file."""
    from kvant.spec.headers import dumps

    return dumps(checked(spec))


def from_json(text: str) -> CacheSpec:
    """The spec of a header that nobody vouches for."""
    from kvant.spec.headers import loads

    return checked(loads(text))


def words(spec: CacheSpec) -> str:
    """The formats of its layers, what stays of the widest one, and what tokens read of it."""
    layers = list(attention_in(*spec.layers))
    if not layers:
        return ""
    told = " and ".join(dict.fromkeys(spelled(*layer.sides.values()) for layer in layers))
    kept = max(layers, key=lambda layer: layer.width).retention
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
