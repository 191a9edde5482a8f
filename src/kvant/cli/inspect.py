"""`kvant inspect`: what a saved cache holds, or how a model's would be stored. Loads no tensors."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Argument, Option

from kvant.checkpoints import load_config, make_meta_model
from kvant.cli import options
from kvant.recipes import CacheSpec, GroupSpec, LayerSpec, Recipe, RecurrentSpec, SharedSpec
from kvant.sizes import format_count, format_size
from kvant.spec import format_codecs
from kvant.tables import make_table

if TYPE_CHECKING:
    from kvant.cache.files import CacheFileHeader, FileTensor
    from kvant.models.shapes import LayerShape
    from kvant.planner import Plan

POSITION_BIAS_KEY = "relative_attention_num_buckets"  # T5, and what was made from it
MAX_METADATA_CHARACTERS = 100  # characters of what a writer said about a file


class LayerLine(NamedTuple):
    """What is alike in several layers."""

    kind: str
    rows: str
    stored: str
    nbytes: int | None  # of one layer; None: nobody tells
    read: str = ""  # by what


def inspect(
    file: Annotated[Path | None, Argument(help="A saved cache.")] = None,
    model: options.Model = None,
    kv_cache: Annotated[str | None, Option(help="How a model's cache is stored.")] = None,
    json: options.Json = False,
) -> None:
    """Show layers, formats and bytes of a saved cache, or of a model's."""
    if file is None:
        told, lines = _inspect_model(model, "raw" if kv_cache is None else kv_cache)
    elif model is not None or kv_cache is not None:
        raise ValueError(f"{file} beside --model or --kv-cache: a file says itself what it holds")
    else:
        told, lines = _inspect_file(file)
    if json:
        print(
            json_text.dumps(told | {"layers": [_make_entry(*pair) for pair in _group_lines(lines)]})
        )
    else:
        _show_report(told, lines)


def _inspect_file(path: Path) -> tuple[dict[str, Any], list[LayerLine]]:
    try:
        size = path.stat().st_size  # before torch is imported
        from kvant.cache.files import read_header

        head = read_header(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    told = {
        "file": str(path),
        "version": head.version,
        "checksum": "SHA-256 verified",
        "nbytes": size,
        "tokens": max(head.padded_lengths, default=_count_tokens(head.numbers)),
        "sequences": len(head.padded_lengths) or None,
        "about": dict(head.about),
    }
    return told, [
        _describe_saved_layer(head, index, one) for index, one in enumerate(head.spec.layers)
    ]


def _count_tokens(numbers: Mapping[str, int]) -> int:
    """Tokens seen, by what recurrent layers say."""
    ends = [n for name, n in numbers.items() if name.rpartition("/")[2] == "now"]
    return max(ends, default=0)


def _describe_saved_layer(head: CacheFileHeader, index: int, recipe: Recipe) -> LayerLine:
    own = {n: t for n, t in head.tensors.items() if n.startswith(f"{index}/")}
    sides = {n: t for n, t in own.items() if n.endswith(("keys.open", "values.open"))}
    rows = {name: one for name, one in sides.items() if len(one.shape) == 3}
    nbytes = sum(tensor.nbytes for tensor in own.values())
    return LayerLine(
        _describe_kind(recipe), _describe_rows(head, rows), _describe_recipe(recipe), nbytes
    )


def _describe_rows(head: CacheFileHeader, sides: Mapping[str, FileTensor]) -> str:
    """[rows, heads, dim] of each side, those of open pages."""
    if not sides:
        return ""
    first = next(iter(sides))
    dims = "/".join(dict.fromkeys(str(one.shape[2]) for one in sides.values()))
    return _format_heads(head.count_key_heads(first), dims, sides[first].dtype)


def _inspect_model(name: str | None, spec: str) -> tuple[dict[str, Any], list[LayerLine]]:
    """Built without memory: its modules say what its configuration leaves open."""
    from kvant.hf import PairedCache, cache_for
    from kvant.models import layer_shapes, max_context
    from kvant.planner import plan

    config = load_config(name)
    model = make_meta_model(config)
    longest = max_context(config)
    cache = cache_for(model, spec)
    own = cache.self_attention_cache if isinstance(cache, PairedCache) else cache
    planned = plan(layer_shapes(model), own.spec)
    if longest is not None and longest < planned.context:
        planned = plan(planned.layers, own.spec, context=longest)
    told = {
        "model": "the model inside" if name is None else name,
        "class": type(model).__name__,
        "max_context": longest,
        "kv_cache": spec,
        "tokens": planned.context,
        "nbytes": planned.nbytes,
        "nbytes_per_token": planned.nbytes_per_token,
        "explanation": str(cache.explain()).splitlines(),
    }
    biased = hasattr(config, POSITION_BIAS_KEY)
    return told, [
        _describe_planned_layer(planned, index, biased) for index in range(len(planned.layers))
    ]


def _describe_planned_layer(planned: Plan, index: int, biased: bool) -> LayerLine:
    layer, recipe = planned.layers[index], planned.spec.layers[index]
    nbytes = None if layer.state_nbytes is None else planned.layer_nbytes[index]
    rows = ""
    if layer.attends:
        dims = "/".join(dict.fromkeys((str(layer.key_dim), str(layer.value_dim))))
        rows = _format_heads(layer.num_heads, dims, str(layer.dtype).removeprefix("torch."))
    stored = _describe_recipe(recipe) if layer.attends or layer.recurs else "kept by transformers"
    if not layer.attends and layer.state_nbytes == 0:
        stored = "reads the rows of another layer, or remembers nothing"
    return LayerLine(layer.kind, rows, stored, nbytes, _find_backend(recipe, layer, biased))


def _find_backend(recipe: Recipe, layer: LayerShape, biased: bool) -> str:
    """The backend that attention on this machine would take, asked with one row.

    A bias on positions is a mask of numbers, which no kernel takes.
    """
    part = dict(recipe.parts).get("attention") if isinstance(recipe, GroupSpec) else recipe
    if not isinstance(part, LayerSpec):
        return ""
    if biased:
        return "reference"
    import torch

    from kvant.attention import explain
    from kvant.cache import Cache

    state = Cache(None, CacheSpec((part,)))[0]
    sides = [layer.key_dim] if part.value_dim is not None else [layer.key_dim, layer.value_dim]
    rows = [torch.zeros(1, layer.num_heads, 1, dim, dtype=layer.dtype) for dim in sides]
    return str(explain(state.append(*rows)).backend)


def _describe_kind(recipe: Recipe) -> str:
    if isinstance(recipe, GroupSpec):
        return " beside ".join(_describe_kind(part) for _, part in recipe.parts)
    if isinstance(recipe, SharedSpec):
        return "shared"
    if isinstance(recipe, RecurrentSpec):
        return "recurrent"
    return "attention" if isinstance(recipe, LayerSpec) else "empty"


def _describe_recipe(recipe: Recipe) -> str:
    if isinstance(recipe, GroupSpec):
        return " beside ".join(_describe_recipe(part) for _, part in recipe.parts)
    if isinstance(recipe, SharedSpec):
        return f"the rows of layer {recipe.layer}"
    if isinstance(recipe, RecurrentSpec):
        return "a state"
    if not isinstance(recipe, LayerSpec):
        return "nothing here"
    told = format_codecs(*recipe.sides.values())
    kept = recipe.retention
    told += "" if kept.window is None else f", the last {kept.window}"
    return told + (f", the first {kept.sinks} dense" if kept.sinks else "")


def _format_heads(count: int, dims: str, dtype: str) -> str:
    return f"{format_count(count, 'head')} of {dims}, {dtype}"


def _group_lines(lines: Sequence[LayerLine]) -> Iterable[tuple[list[int], LayerLine]]:
    """The layers of each line, wherever they stand."""
    places: dict[LayerLine, list[int]] = {}
    for index, line in enumerate(lines):
        places.setdefault(line, []).append(index)
    return [(indices, line) for line, indices in places.items()]


def _make_entry(indices: list[int], line: LayerLine) -> dict[str, Any]:
    return {"layers": indices} | {n: v for n, v in line._asdict().items() if v != ""}


def _format_ranges(indices: Sequence[int]) -> str:
    """0-4, 6-10"""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _show_report(report: Mapping[str, Any], lines: Sequence[LayerLine]) -> None:
    console, table = make_table()
    for name, value in report.items():
        if value not in (None, {}, []):
            console.print(f"{name}: {_format_value(name, value)}", soft_wrap=True)
    read = ["read by"] if any(line.read for line in lines) else []  # of a file, nobody knows
    for head in ("layers", "kind", "rows", "stored", *read):
        table.add_column(head)
    table.add_column("bytes a layer", justify="right", no_wrap=True)
    for indices, line in _group_lines(lines):
        cells = [_format_ranges(indices), line.kind, line.rows, line.stored]
        cells += [line.read] if read else []
        table.add_row(*cells, "not told" if line.nbytes is None else format_size(line.nbytes))
    console.print()
    console.print(table)


def _summarize_metadata(value: Any) -> str:
    """What a writer said of a file: of a conversation its turns, else how it begins."""
    if isinstance(value, dict) and isinstance(value.get("turns"), list):
        return format_count(len(value["turns"]), "turn")
    return shorten(str(value), MAX_METADATA_CHARACTERS, placeholder=" ...")


def _format_value(name: str, value: Any) -> str:
    if name == "nbytes":
        return format_size(value)
    if isinstance(value, dict):  # --json has all of it
        return ", ".join(f"{key} ({_summarize_metadata(one)})" for key, one in value.items())
    return "; ".join(value) if isinstance(value, list) else str(value)
