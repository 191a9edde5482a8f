"""`kvant inspect`: describe the layers of a saved cache, or of a model's. Loads no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Argument, Option

from kvant.checkpoints import load_config, make_meta_model
from kvant.cli import options, print_json, print_line, print_table
from kvant.platform.sizes import format_count, format_size
from kvant.platform.terminal import make_printable
from kvant.recipes import CacheSpec, GroupSpec, LayerSpec, Recipe, RecurrentSpec, SharedSpec
from kvant.spec import format_codecs

if TYPE_CHECKING:
    from kvant.cache.files import CacheFileHeader, FileTensor
    from kvant.models.shapes import LayerShape
    from kvant.planner import Plan

POSITION_BIAS_KEY = "relative_attention_num_buckets"  # in configurations of T5 and its derivatives
MAX_METADATA_CHARACTERS = 100  # shown per entry of a file's metadata


class LayerLine(NamedTuple):
    """One line of the table: what equal layers have in common."""

    kind: str
    rows: str
    stored: str
    nbytes: int | None  # per layer; None: unknown
    read: str = ""  # the backend that reads it


def inspect(
    file: Annotated[Path | None, Argument(help="Saved cache.")] = None,
    model: options.Model = None,
    kv_cache: Annotated[str | None, Option(help="Format of the model's cache.")] = None,
    json: options.Json = False,
) -> None:
    """Show layers, formats and bytes of a saved cache or a model."""
    if file is None:
        report, lines = _inspect_model(model, "raw" if kv_cache is None else kv_cache)
    elif model is not None or kv_cache is not None:
        raise ValueError(
            f"{file} with --model or --kv-cache: the file has its own; drop the option"
        )
    else:
        report, lines = _inspect_file(file)
    if json:
        layers = [
            {"layers": indices} | {n: v for n, v in line._asdict().items() if v != ""}
            for indices, line in _group_lines(lines)
        ]
        print_json(report | {"layers": layers})
    else:
        _show_report(report, lines)


def _inspect_file(path: Path) -> tuple[dict[str, Any], list[LayerLine]]:
    try:
        size = path.stat().st_size  # fails before the import of torch, if there is no such file
        from kvant.cache.files import read_header

        head = read_header(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    report = {
        "file": str(path),
        "version": head.version,
        "checksum": "SHA-256 verified",
        "nbytes": size,
        "tokens": max(head.padded_lengths, default=_count_tokens(head.numbers)),
        "sequences": len(head.padded_lengths) or None,
        "extensions": [str(extension) for extension in head.extensions],
        "about": dict(head.about),
    }
    return report, [
        _describe_saved_layer(head, index, recipe) for index, recipe in enumerate(head.spec.layers)
    ]


def _count_tokens(numbers: Mapping[str, int]) -> int:
    """Return the length of a cache of recurrent layers, from the positions of their states."""
    positions = [value for name, value in numbers.items() if name.rpartition("/")[2] == "now"]
    return max(positions, default=0)


def _describe_saved_layer(head: CacheFileHeader, index: int, recipe: Recipe) -> LayerLine:
    tensors = {n: t for n, t in head.tensors.items() if n.startswith(f"{index}/")}
    sides = {n: t for n, t in tensors.items() if n.endswith(("keys.open", "values.open"))}
    rows = {name: tensor for name, tensor in sides.items() if len(tensor.shape) == 3}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    kind, stored = _describe_recipe(recipe)
    return LayerLine(kind, _describe_rows(head, rows), stored, nbytes)


def _describe_rows(head: CacheFileHeader, sides: Mapping[str, FileTensor]) -> str:
    """Describe heads, dimensions and dtype from the open pages of each side: [rows, heads, dim]."""
    if not sides:
        return ""
    first = next(iter(sides))
    dims = "/".join(dict.fromkeys(str(tensor.shape[2]) for tensor in sides.values()))
    return _format_heads(head.count_key_heads(first), dims, sides[first].dtype)


def _inspect_model(name: str | None, spec: str) -> tuple[dict[str, Any], list[LayerLine]]:
    """Describe the cache of a model built on the meta device.

    Its modules show what its configuration leaves open.
    """
    from kvant.hf import PairedCache, make_model_cache
    from kvant.models import layer_shapes, max_context
    from kvant.planner import plan

    config = load_config(name)
    model = make_meta_model(config)
    max_length = max_context(config)
    cache = make_model_cache(model, spec)
    decoder_cache = cache.self_attention_cache if isinstance(cache, PairedCache) else cache
    cache_plan = plan(layer_shapes(model), decoder_cache.spec)
    if max_length is not None and max_length < cache_plan.context:
        cache_plan = plan(cache_plan.layers, decoder_cache.spec, context=max_length)
    report = {
        "model": "the model inside" if name is None else name,
        "class": type(model).__name__,
        "max_context": max_length,
        "kv_cache": spec,
        "tokens": cache_plan.context,
        "nbytes": cache_plan.nbytes,
        "nbytes_per_token": cache_plan.nbytes_per_token,
        "explanation": str(cache.explain()).splitlines(),
    }
    has_position_bias = hasattr(config, POSITION_BIAS_KEY)
    return report, [
        _describe_planned_layer(cache_plan, index, has_position_bias)
        for index in range(len(cache_plan.layers))
    ]


def _describe_planned_layer(cache_plan: Plan, index: int, has_position_bias: bool) -> LayerLine:
    layer, recipe = cache_plan.layers[index], cache_plan.spec.layers[index]
    nbytes = None if layer.state_nbytes is None else cache_plan.layer_nbytes[index]
    rows = ""
    if layer.attends:
        dims = "/".join(dict.fromkeys((str(layer.key_dim), str(layer.value_dim))))
        rows = _format_heads(layer.num_heads, dims, str(layer.dtype).removeprefix("torch."))
    _, stored = _describe_recipe(recipe)
    if not (layer.attends or layer.recurs):
        stored = "stored by transformers"
    if not layer.attends and layer.state_nbytes == 0:
        stored = "reads the rows of another layer, or has no state"
    return LayerLine(
        layer.kind, rows, stored, nbytes, _find_backend(recipe, layer, has_position_bias)
    )


def _find_backend(recipe: Recipe, layer: LayerShape, has_position_bias: bool) -> str:
    """Return the backend that attention would use on this machine, found with a one-row cache.

    A position bias is an additive mask, which no kernel supports.
    """
    part = dict(recipe.parts).get("attention") if isinstance(recipe, GroupSpec) else recipe
    if not isinstance(part, LayerSpec):
        return ""
    if has_position_bias:
        return "reference"
    import torch

    from kvant.attention import explain
    from kvant.cache import Cache

    cache_layer = Cache(None, CacheSpec((part,)))[0]
    dims = [layer.key_dim] if part.value_dim is not None else [layer.key_dim, layer.value_dim]
    rows = [torch.zeros(1, layer.num_heads, 1, dim, dtype=layer.dtype) for dim in dims]
    return str(explain(cache_layer.append(*rows)).backend)


def _describe_recipe(recipe: Recipe) -> tuple[str, str]:
    """Return the kind of a layer and what it stores."""
    match recipe:
        case GroupSpec():
            kinds, contents = zip(*(_describe_recipe(p) for _, p in recipe.parts), strict=True)
            return " and ".join(kinds), " and ".join(contents)
        case SharedSpec():
            return "shared", f"the rows of layer {recipe.layer}"
        case RecurrentSpec():
            return "recurrent", "a recurrent state"
        case LayerSpec():
            stored, retention = format_codecs(*recipe.sides.values()), recipe.retention
            stored += "" if retention.window is None else f", window {retention.window}"
            stored += f", {retention.sinks} dense sinks" if retention.sinks else ""
            return "attention", stored
    return "empty", "nothing"


def _format_heads(count: int, dims: str, dtype: str) -> str:
    return f"{format_count(count, 'head')} of {dims}, {dtype}"


def _group_lines(lines: Sequence[LayerLine]) -> Iterable[tuple[list[int], LayerLine]]:
    """Group layers with equal lines, adjacent or not."""
    indices_by_line: dict[LayerLine, list[int]] = {}
    for index, line in enumerate(lines):
        indices_by_line.setdefault(line, []).append(index)
    return [(indices, line) for line, indices in indices_by_line.items()]


def _format_ranges(indices: Sequence[int]) -> str:
    """Format layer indices as ranges: 0-4, 6-10."""
    ranges = []
    for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        first, *others = (index for _, index in run)
        ranges.append(f"{first}-{others[-1]}" if others else str(first))
    return ", ".join(ranges)


def _show_report(report: Mapping[str, Any], lines: Sequence[LayerLine]) -> None:
    for name, value in report.items():
        if value not in (None, {}, []):
            print_line(f"{name}: {_format_value(name, value)}")
    texts = ["layers", "kind", "rows", "stored"]
    texts += ["read by"] if any(line.read for line in lines) else []  # not for a file
    rows = []
    for indices, line in _group_lines(lines):
        cells = [_format_ranges(indices), line.kind, line.rows, line.stored, line.read]
        nbytes = "unknown" if line.nbytes is None else format_size(line.nbytes)
        rows.append([*cells[: len(texts)], nbytes])
    print_line("")
    print_table([*texts, ">bytes a layer"], rows, wrapped=texts)


def _summarize_metadata(value: Any) -> str:
    """Summarize an entry of a file's metadata: the turns of a conversation, else its start."""
    if isinstance(value, dict) and isinstance(value.get("turns"), list):
        return format_count(len(value["turns"]), "turn")
    return make_printable(shorten(str(value), MAX_METADATA_CHARACTERS, placeholder=" ..."))


def _format_value(name: str, value: Any) -> str:
    if name == "nbytes":
        return format_size(value)
    if isinstance(value, dict):  # metadata; --json prints it in full
        return ", ".join(
            f"{make_printable(key)} ({_summarize_metadata(entry)})" for key, entry in value.items()
        )
    return "; ".join(value) if isinstance(value, list) else str(value)
