"""`kvant inspect`: what a saved cache holds, or how a model's would be stored. Loads no tensors."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Argument, Option

from kvant.checkpoints import configuration, skeleton
from kvant.cli import options
from kvant.recipes import CacheSpec, GroupSpec, LayerSpec, Recipe, RecurrentSpec, SharedSpec
from kvant.sizes import counted, format_size
from kvant.spec import spelled
from kvant.tables import blank

if TYPE_CHECKING:
    from kvant.cache.files import Header, Stored
    from kvant.models.shapes import LayerShape
    from kvant.planner import Plan

BIAS = "relative_attention_num_buckets"  # T5, and what was made from it
MOST_SAID = 100  # characters of what a writer said about a file


class Line(NamedTuple):
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
        told, lines = _of_model(model, "raw" if kv_cache is None else kv_cache)
    elif model is not None or kv_cache is not None:
        raise ValueError(f"{file} beside --model or --kv-cache: a file says itself what it holds")
    else:
        told, lines = _of_file(file)
    if json:
        print(json_text.dumps(told | {"layers": [_entry(*pair) for pair in _grouped(lines)]}))
    else:
        _show(told, lines)


def _of_file(path: Path) -> tuple[dict[str, Any], list[Line]]:
    try:
        size = path.stat().st_size  # before torch is imported
        from kvant.cache.files import header

        head = header(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    told = {
        "file": str(path),
        "version": head.version,
        "checksum": "SHA-256 verified",
        "nbytes": size,
        "tokens": max(head.columns, default=_tokens(head.numbers)),
        "sequences": len(head.columns) or None,
        "about": dict(head.about),
    }
    return told, [_saved(head, index, one) for index, one in enumerate(head.spec.layers)]


def _tokens(numbers: Mapping[str, int]) -> int:
    """Tokens seen, by what recurrent layers say."""
    ends = [n for name, n in numbers.items() if name.rpartition("/")[2] == "now"]
    return max(ends, default=0)


def _saved(head: Header, index: int, recipe: Recipe) -> Line:
    own = {n: t for n, t in head.tensors.items() if n.startswith(f"{index}/")}
    sides = {n: t for n, t in own.items() if n.endswith(("keys.open", "values.open"))}
    rows = {name: one for name, one in sides.items() if len(one.shape) == 3}
    nbytes = sum(tensor.nbytes for tensor in own.values())
    return Line(_kind(recipe), _rows(head, rows), _recipe(recipe), nbytes)


def _rows(head: Header, sides: Mapping[str, Stored]) -> str:
    """[rows, heads, dim] of each side, those of open pages."""
    if not sides:
        return ""
    first = next(iter(sides))
    dims = "/".join(dict.fromkeys(str(one.shape[2]) for one in sides.values()))
    return _heads(head.key_heads(first), dims, sides[first].dtype)


def _of_model(name: str | None, spec: str) -> tuple[dict[str, Any], list[Line]]:
    """Built without memory: its modules say what its configuration leaves open."""
    from kvant.hf import PairedCache, cache_for
    from kvant.models import layer_shapes, max_context
    from kvant.planner import plan

    config = configuration(name)
    model = skeleton(config)
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
    biased = hasattr(config, BIAS)
    return told, [_to_be(planned, index, biased) for index in range(len(planned.layers))]


def _to_be(planned: Plan, index: int, biased: bool) -> Line:
    layer, recipe = planned.layers[index], planned.spec.layers[index]
    nbytes = None if layer.state_nbytes is None else planned.layer_nbytes[index]
    rows = ""
    if layer.attends:
        dims = "/".join(dict.fromkeys((str(layer.key_dim), str(layer.value_dim))))
        rows = _heads(layer.num_heads, dims, str(layer.dtype).removeprefix("torch."))
    stored = _recipe(recipe) if layer.attends or layer.recurs else "kept by transformers"
    if not layer.attends and layer.state_nbytes == 0:
        stored = "reads the rows of another layer, or remembers nothing"
    return Line(layer.kind, rows, stored, nbytes, _reader(recipe, layer, biased))


def _reader(recipe: Recipe, layer: LayerShape, biased: bool) -> str:
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


def _kind(recipe: Recipe) -> str:
    if isinstance(recipe, GroupSpec):
        return " beside ".join(_kind(part) for _, part in recipe.parts)
    if isinstance(recipe, SharedSpec):
        return "shared"
    if isinstance(recipe, RecurrentSpec):
        return "recurrent"
    return "attention" if isinstance(recipe, LayerSpec) else "empty"


def _recipe(recipe: Recipe) -> str:
    if isinstance(recipe, GroupSpec):
        return " beside ".join(_recipe(part) for _, part in recipe.parts)
    if isinstance(recipe, SharedSpec):
        return f"the rows of layer {recipe.layer}"
    if isinstance(recipe, RecurrentSpec):
        return "a state"
    if not isinstance(recipe, LayerSpec):
        return "nothing here"
    told = spelled(*recipe.sides.values())
    kept = recipe.retention
    told += "" if kept.window is None else f", the last {kept.window}"
    return told + (f", the first {kept.sinks} dense" if kept.sinks else "")


def _heads(count: int, dims: str, dtype: str) -> str:
    return f"{counted(count, 'head')} of {dims}, {dtype}"


def _grouped(lines: Sequence[Line]) -> Iterable[tuple[list[int], Line]]:
    """The layers of each line, wherever they stand."""
    places: dict[Line, list[int]] = {}
    for index, line in enumerate(lines):
        places.setdefault(line, []).append(index)
    return [(indices, line) for line, indices in places.items()]


def _entry(indices: list[int], line: Line) -> dict[str, Any]:
    return {"layers": indices} | {n: v for n, v in line._asdict().items() if v != ""}


def _ranges(indices: Sequence[int]) -> str:
    """0-4, 6-10"""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _show(told: Mapping[str, Any], lines: Sequence[Line]) -> None:
    console, table = blank()
    for name, value in told.items():
        if value not in (None, {}, []):
            console.print(f"{name}: {_said(name, value)}", soft_wrap=True)
    read = ["read by"] if any(line.read for line in lines) else []  # of a file, nobody knows
    for head in ("layers", "kind", "rows", "stored", *read):
        table.add_column(head)
    table.add_column("bytes a layer", justify="right", no_wrap=True)
    for indices, line in _grouped(lines):
        cells = [_ranges(indices), line.kind, line.rows, line.stored]
        cells += [line.read] if read else []
        table.add_row(*cells, "not told" if line.nbytes is None else format_size(line.nbytes))
    console.print()
    console.print(table)


def _about(value: Any) -> str:
    """What a writer said of a file: of a conversation its turns, else how it begins."""
    if isinstance(value, dict) and isinstance(value.get("turns"), list):
        return counted(len(value["turns"]), "turn")
    return shorten(str(value), MOST_SAID, placeholder=" ...")


def _said(name: str, value: Any) -> str:
    if name == "nbytes":
        return format_size(value)
    if isinstance(value, dict):  # --json has all of it
        return ", ".join(f"{key} ({_about(one)})" for key, one in value.items())
    return "; ".join(value) if isinstance(value, list) else str(value)
