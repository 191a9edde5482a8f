"""The spec language: parse a string, or a JSON object, into the recipe of every layer.

    spec := format ("," option)*
    auto := "auto" (":" SIZE)? ("," "max_kl=" NATS)? ("," "max_lost=" SHARE)?
          | "auto:" BITS "bits"

`auto` is the smallest format that a model tolerates, found by trial. `auto:3.25bits` is the best
for the model in 3.25 bits a value, by layer and side.

formats.py and options.py parse words, headers.py parses JSON. This module builds recipes from them
and checks recipes of any origin alike. Anything unknown, repeated or contradictory is a SpecError
with the value, the allowed values and the nearest valid one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from reprlib import repr as short
from typing import Any, NamedTuple

from kvant.errors import SpecError
from kvant.platform.sizes import parse_size
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
from kvant.retention import DEFAULT_WINDOW_SINKS, RETENTIONS, KeepAll, Retention, Window
from kvant.spec.formats import (
    AUTO_WORD,
    MAX_LAYERS,
    CodecOptions,
    LayerFormat,
    format_codecs,
    format_layers,
    parse_format,
)
from kvant.spec.options import (
    ADAPTIVE,
    MAX_OPTION_VALUE,
    NUM_UNSELECTED_LAYERS,
    OPTION_PARSERS,
    LayerRun,
    check_options,
    parse_options,
)
from kvant.spec.tables import RETENTION_TABLE

OPTION_FIELDS = {
    name: name for name in ("tail", "page", "slack", "prefill", "step", "capacity", "prune")
}
OPTION_FIELDS["start"] = "dense_until"  # option -> field of LayerSpec
MIN_VALUES = dict.fromkeys(
    ("page", "step", "capacity", "chunk", "value_dim", "window", "max_checkpoints"), 1
)  # other minima are 0; only text must give pages in multiples of 64
MAX_VALUES = {"step": 1 << 16}  # other maxima are MAX_OPTION_VALUE; a file may request a step
MAX_KL = 5e-3  # mean nats: about one percent of perplexity
MAX_LOST = 0.04  # share of the probability of an answer: formats lose about half or twice this
AUTO_BITS_PATTERN = re.compile(rf"{AUTO_WORD.word}:([0-9]{{1,2}}(?:\.[0-9]{{1,4}})?) ?bits")
Recipes = Sequence[Recipe]


def as_spec(spec: AnySpec, num_layers: int | None) -> CacheSpec:
    """Convert any spec to a checked CacheSpec of `num_layers` layers; a LayerSpec serves all."""
    if isinstance(spec, CacheSpec) and num_layers is None:
        return check_spec(spec)
    if num_layers is None:
        raise SpecError("num_layers is needed, unless the spec is a CacheSpec")
    if isinstance(spec, str):
        return parse(spec, num_layers)
    if isinstance(spec, LayerSpec):
        spec = CacheSpec((spec,) * num_layers)
    if not isinstance(spec, CacheSpec):
        raise SpecError(f"{short(spec)} is not a spec; allowed: a string, a LayerSpec, a CacheSpec")
    if len(spec.layers) != num_layers:
        raise SpecError(
            f"the spec has {len(spec.layers)} layers, the cache {num_layers};"
            f" nearest: a CacheSpec of {num_layers} layers, or one LayerSpec for all"
        )
    return check_spec(spec)


def parse(text: str, num_layers: int) -> CacheSpec:
    """Parse a string such as "affine4,window=4096" into the recipes of `num_layers` layers.

    >>> spec = kvant.parse("affine4,window=4096", num_layers=32)
    >>> len(spec.layers), spec.layers[0].retention
    (32, Window(window=4096, sinks=4))
    """
    if not isinstance(num_layers, int):
        raise TypeError(
            f"num_layers={short(num_layers)}: give the number of layers first, then the spec"
        )
    if not 1 <= num_layers <= MAX_LAYERS:
        raise SpecError(f"num_layers={num_layers}: allowed is 1 to {MAX_LAYERS}; nearest: 1")
    words = parse_words(text)
    if words.runs and words.runs[-1].last >= num_layers:
        raise SpecError(
            f"option 'layers' names layer {words.runs[-1].last} of {num_layers} that attend,"
            f" counted from 0; allowed: 0 to {num_layers - 1}; nearest: {num_layers - 1}"
        )
    layers = (
        make_recipe(words.find_format(layer, num_layers), words.options, layer)
        for layer in range(num_layers)
    )
    return check_spec(CacheSpec(tuple(layers)))


def parse_main_layer(text: str) -> LayerSpec:
    """Parse the recipe of most layers: of those that neither `edge` nor `layers` names, and that
    `select` does not leave out.
    """
    words = parse_words(text)
    return make_recipe(words.main, words.options, MAX_LAYERS - 1)


class ParsedWords(NamedTuple):
    """The words of a spec, parsed and checked."""

    main: LayerFormat
    edge: LayerFormat
    edge_layers: int  # layers in `edge`, at each end
    runs: tuple[LayerRun, ...]  # layers in formats of their own
    options: Mapping[str, Any]

    def find_format(self, layer: int, num_layers: int) -> LayerFormat:
        """Return the format of layer number `layer`."""
        if min(layer, num_layers - 1 - layer) < self.edge_layers:
            return self.edge
        return next((run.format for run in self.runs if run.first <= layer <= run.last), self.main)


def parse_words(text: str) -> ParsedWords:
    """Parse a spec into its formats and options, and check that they fit together.

    This builds no codecs and imports no torch.
    """
    first, *rest = (word.strip() for word in text.split(","))
    if first.partition("=")[0] in OPTION_PARSERS:
        raise SpecError(
            f"spec {short(text)} has no format; allowed: a format, then options;"
            f" nearest: affine8,{short(first)[1:-1]}"
        )
    main = parse_format(first)
    options = parse_options(rest)
    edge_layers, edge = options.get("edge", (0, main))
    runs = options.get("layers", ())
    formats = (main, *(run.format for run in runs), *((edge,) if edge_layers else ()))
    check_options(options, formats)
    return ParsedWords(main, edge, edge_layers, runs, options)


def split_specs(text: str) -> list[str]:
    """Split a list of specs: "raw,step=1,affine8" is two, as options follow their format."""
    specs: list[str] = []
    for word in (part.strip() for part in text.split(",")):
        if specs and ("=" in word or word in OPTION_PARSERS):
            specs[-1] += f",{word}"
        else:
            specs.append(word)
    return specs


def make_recipe(layer_format: LayerFormat, options: Mapping[str, Any], layer: int) -> LayerSpec:
    """Build the recipe of layer number `layer`."""
    codec_options = CodecOptions(
        options.get("group"), "rotate" in options, "smooth" in options, options.get("seed", 0)
    )
    keys, values = layer_format.make_codecs(codec_options, layer)
    retention: Retention = KeepAll(options.get("sinks", 0))
    if "window" in options:
        retention = Window(options["window"], options.get("sinks", DEFAULT_WINDOW_SINKS))
    retention = options.get("retain", retention)
    selection, first_layer = options.get("select", (None, 0))
    selection = selection if layer >= first_layer else None
    layer_spec = LayerSpec(keys, values, retention, dtype=layer_format.dtype, select=selection)
    return replace(
        layer_spec, **{OPTION_FIELDS[n]: options[n] for n in OPTION_FIELDS if n in options}
    )


def check_spec(spec: CacheSpec) -> CacheSpec:
    """Return `spec` if its numbers are in range and its layers fit together."""
    if len(spec.layers) > MAX_LAYERS:
        raise SpecError(f"the spec has {len(spec.layers)} layers; allowed: at most {MAX_LAYERS}")
    previous: list[Recipe] = []
    for index, layer in enumerate(spec.layers):
        if type(layer) not in CHECKS:
            raise SpecError(
                f"layers[{index}] is {short(layer)}; allowed: {', '.join(RECIPES_BY_KIND)}"
            )
        CHECKS[type(layer)](layer, f"layers[{index}]", previous)
        previous.append(layer)
    return spec


def check_layer(layer: LayerSpec, path: str, previous: Recipes) -> None:
    """Refuse numbers out of range, and a prune of a layer that cannot prune."""
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
                f"{path}.prune with a window, sinks, a chunk or values inside the keys;"
                " allowed: a layer that keeps and reads every row; nearest: no prune"
            )
    if layer.dtype is not None:
        from kvant.platform.torch_runtime import DTYPES

        if layer.dtype not in DTYPES.values():
            raise SpecError(
                f"{path}.dtype is {layer.dtype}; allowed: {', '.join(DTYPES)}; nearest: float32"
            )


def check_fitted(spec: CacheSpec) -> CacheSpec:
    """Return `spec` if no frame of it still has to be fitted to a model."""
    from kvant.codecs.frames import SmoothPlaceholder, needs_fitting

    for layer in iterate_attention(*spec.layers):
        if any(needs_fitting(codec.frame) for codec in layer.sides.values()):
            SmoothPlaceholder().refuse()
    return spec


def refuse_second_pass(spec: CacheSpec) -> CacheSpec:
    """Return `spec` unless the score of a prune needs a second pass of the model."""
    if spec.repeats_prompt:
        raise SpecError(
            f"{describe_spec(spec)}: the score needs a second pass of the model over the prompt, "
            "which a cache alone cannot run: use kvant.generate, kvant.Session, kvant.Engine or "
            "`kvant run`, or a score without it, such as prune=keydiff:25%"
        )
    return spec


def check_parts(layer: GroupSpec, path: str, previous: Recipes) -> None:
    """Check the names of the parts, and each part."""
    names = [name for name, _ in layer.parts]
    if not names or len(set(names)) < len(names) or any("/" in name for name in names):
        raise SpecError(f"{path}.parts is {short(names)}; allowed: distinct names without a slash")
    for name, part in layer.parts:
        CHECKS[type(part)](part, f"{path}.{short(name)}", previous)


def check_shared(layer: SharedSpec, path: str, previous: Recipes) -> None:
    """Refuse to share a layer that does not precede this one."""
    if not 0 <= layer.layer < len(previous) or isinstance(previous[layer.layer], EmptySpec):
        nearest = min(max(layer.layer, 0), len(previous) - 1) if previous else "a recipe of its own"
        raise SpecError(
            f"{path}.layer is {short(layer.layer)}; allowed: a previous layer; nearest: {nearest}"
        )


def check_numbers(owner: object, path: str, names: str) -> None:
    """Refuse a field of `owner` that is out of range; `names` are separated by spaces."""
    for name in names.split():
        minimum, maximum = MIN_VALUES.get(name, 0), MAX_VALUES.get(name, MAX_OPTION_VALUE)
        value = getattr(owner, name)
        if value is not None and not minimum <= value <= maximum:
            nearest = min(max(value, minimum), maximum)
            raise SpecError(
                f"{path}.{name} is {short(value)}; allowed: {minimum} to {maximum};"
                f" nearest: {nearest}"
            )


CHECKS: dict[type, Callable[[Any, str, Recipes], None]] = {
    LayerSpec: check_layer,
    RecurrentSpec: lambda layer, path, _: check_numbers(layer, path, "max_checkpoints"),
    GroupSpec: check_parts,
    SharedSpec: check_shared,
    EmptySpec: lambda *_: None,  # it has no fields
}


def to_json(spec: CacheSpec) -> str:
    """Encode `spec` as one line of JSON, for the header of a file."""
    from kvant.spec.headers import dumps

    return dumps(check_spec(spec))


def from_json(text: str) -> CacheSpec:
    """Decode and check the spec of an untrusted header."""
    from kvant.spec.headers import loads

    return check_spec(loads(text))


def describe_spec(spec: CacheSpec) -> str:
    """Describe a spec in its own words: formats, widest retention, selection and prune.

    `parse` returns the same spec if it has no other options, and one retention for all layers.
    """
    layers = list(iterate_attention(*spec.layers))
    if not layers:
        return ""
    text = format_layers([format_codecs(*layer.sides.values()) for layer in layers])
    retention = max(layers, key=lambda layer: layer.effective_window).retention
    name = RETENTION_TABLE.find_name(type(retention))
    if name is not None and name not in RETENTIONS and retention == RETENTION_TABLE[name]():
        text += f",retain={name}"
    else:
        text += f",window={retention.window}" if retention.window is not None else ""
        # With a window, 0 is not the default.
        has_sinks = retention.window is not None or retention.sinks
        text += f",sinks={retention.sinks}" if has_sinks else ""
    selecting = ((layer.select, i) for i, layer in enumerate(layers) if layer.select is not None)
    selection, first_layer = next(selecting, (None, 0))
    if selection is not None:
        text += f",select={selection.pages or f'{selection.percent:g}%'}"
        text += f":{first_layer}" if first_layer != NUM_UNSELECTED_LAYERS else ""
    prune = next((layer.prune for layer in layers if layer.prune is not None), None)
    if prune is not None:
        text += f",prune={prune.score.name}:{prune.rows or f'{prune.percent:g}%'}"
        text += f":{ADAPTIVE}" if prune.adaptive else ""
    return text


@dataclass(frozen=True)
class Tolerance:
    """Limits on the loss that a format may cause."""

    max_kl: float = MAX_KL  # mean nats
    max_lost: float = MAX_LOST  # share of the probability of the right answer

    def __post_init__(self) -> None:
        for name in ("max_kl", "max_lost"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"{name}={value}: 0 or more is needed")


def is_auto(spec: object) -> bool:
    """Return whether a spec is `auto`, with or without limits."""
    return (
        isinstance(spec, str)
        and _split_options(spec)[0].partition(":")[0].strip() == AUTO_WORD.word
    )


def parse_auto_bits(spec: str) -> float | None:
    """Return the bits a value of `auto:3.25bits`, None for another limit."""
    first, *options = _split_options(spec)
    match = AUTO_BITS_PATTERN.fullmatch(first)
    if match is None:
        if "bit" not in first.lower():
            return None
        number = re.search(r"[0-9]{1,6}(\.[0-9]{1,4})?", first)
        nearest = min(float(number[0]), 99) if number else 3.25
        raise SpecError(
            f"{short(spec)}: not a limit of bits; allowed: auto:1bits to auto:99bits, with up to 4"
            f" decimals; nearest: auto:{nearest:g}bits"
        )
    if options:
        raise SpecError(
            f"{spec!r}: a limit of bits takes no options, as it has the least loss in these bits;"
            f" nearest: {first}"
        )
    return float(match[1])


def parse_auto_size(spec: str) -> str | None:
    """Return the size limit of `auto:SIZE`, None without one."""
    _, colon, size = _split_options(spec)[0].partition(":")
    if colon and not size:
        raise SpecError(f"{spec!r}: a size is needed after the colon; nearest: auto:1GiB")
    if not colon:
        return None
    parse_size(size)
    return size


def parse_auto_tolerance(spec: str, default: Tolerance) -> Tolerance:
    """Return the limits of `auto,max_kl=NATS,max_lost=SHARE`, from `default` if absent."""
    limits: dict[str, float] = {}
    for part in _split_options(spec)[1:]:
        name, _, number = part.partition("=")
        if name not in ("max_kl", "max_lost") or name in limits:
            raise SpecError(f"{spec!r}: auto takes max_kl=NATS and max_lost=SHARE, each once")
        try:
            limits[name] = float(number)
        except ValueError:
            raise SpecError(f"{spec!r}: {name} needs a number; nearest: {name}=0.01") from None
    return replace(default, **limits)


def check_spec_or_auto(spec: str) -> None:
    """Refuse an invalid spec or `auto`, without building codecs or importing torch."""
    if is_auto(spec):
        if parse_auto_bits(spec) is None:
            parse_auto_size(spec)
            parse_auto_tolerance(spec, Tolerance())
    else:
        parse_words(spec)


def _split_options(spec: str) -> list[str]:
    return [part.strip() for part in spec.split(",")]
