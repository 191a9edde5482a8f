"""`kvant plan`: what a cache of a model takes in each format, before anything is loaded.

A configuration is all it reads: no weights, and for a config.json no transformers either.
"""

from __future__ import annotations

import json as json_text
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from kvant import demo
from kvant.checkpoints import load_config, read_config
from kvant.cli import options
from kvant.recipes import iterate_attention
from kvant.retention import KeepAll
from kvant.sizes import format_size, parse_size
from kvant.spec.auto import check_spec_or_auto, is_auto
from kvant.tables import make_table

if TYPE_CHECKING:
    import torch

    from kvant.contracts import Retention
    from kvant.models.shapes import LayerShape
    from kvant.planner import Plan

RAW = "raw"
EIGHT_BITS = ("affine8", "fp8")
PLANNED_FORMATS = (
    RAW,
    *EIGHT_BITS,
    "affine6",
    "affine8v4",
    "affine4",
    "turbo4v4",
    "turbo4v2",
    "turbo3",
)


def plan(
    model: options.Model = None,
    config: Annotated[Path | None, Option(help="A config.json, read as it is.")] = None,
    context: Annotated[int | None, Option(min=1, help="Tokens of a sequence.")] = None,
    sequences: Annotated[int, Option(min=1)] = 1,
    budget: Annotated[str | None, Option(help="Memory, such as 8GiB.")] = None,
    kv_cache: Annotated[
        list[str] | None, Option(help="A format with its options; again for more.")
    ] = None,
    json: options.Json = False,
) -> None:
    """How many bytes the cache of a model takes, format by format."""
    limit = None if budget is None else parse_size(budget)
    for spec in kv_cache or []:
        check_spec_or_auto(spec)
    from kvant.models import layer_shapes, max_context
    from kvant.planner import plan as planned

    name, told = _load_config(model, config)
    layers, longest = layer_shapes(told), max_context(told)
    automatic = [spec for spec in kv_cache or [] if is_auto(spec)]
    named = [spec for spec in kv_cache or [] if not is_auto(spec)]
    specs, refused = (named, []) if named else _list_supported_formats(layers)
    if context is None:  # the longest that all have room for
        context = min(planned(layers, spec).context for spec in specs)
        context = context if longest is None else min(context, longest)
    raw = planned(layers, RAW, context=context, sequences=sequences)
    plans = [planned(layers, spec, context=context, sequences=sequences) for spec in specs]
    rows = [_make_row(spec, one, raw, limit) for spec, one in zip(specs, plans, strict=True)]
    notes = _make_notes(raw, longest, told) + refused
    notes += [
        f"{spec}: once a prompt of {context} tokens is read, {format_size(one.nbytes_kept)} stay"
        for spec, one in zip(specs, plans, strict=True)
        if one.nbytes_kept < one.nbytes
    ]
    notes += [
        f"{spec}: {_describe_window(rule)}"
        for spec, rule in zip(specs, map(_widest_rule, plans), strict=True)
        if rule.window is not None and rule != _widest_rule(raw)  # which is the model's own
    ]
    notes += _budget_notes(rows, limit, longest)
    notes += [
        f"{spec}: found by trying formats on the model, which kvant run --kv-cache {spec} does"
        for spec in automatic
    ]
    if json:
        figures = {"model": name, "context": raw.context, "sequences": sequences}
        figures |= {
            "dtype": _format_dtype(layers[0].dtype),
            "max_context": longest,
            "budget": limit,
            "layers": len(layers),
        }
        figures |= {"uncounted": raw.uncounted_layers, "notes": notes, "formats": rows}
        print(json_text.dumps(figures))
    else:
        _show_plan(f"{name}: {_describe_layers(layers)}", rows, notes, raw, limit)


def _budget_notes(
    rows: Sequence[dict[str, Any]], limit: int | None, longest: int | None
) -> list[str]:
    """Name the formats of which the budget holds more tokens than the model was made for."""
    if limit is None or longest is None:
        return []
    found = [
        row["kv_cache"]
        for row in rows
        if row["largest_context"] is None or row["largest_context"] > longest
    ]
    note = f"{', '.join(found)}: more tokens fit than the {longest} this model was made for"
    return [note] if found else []


def _widest_rule(cache_plan: Plan) -> Retention:
    """Return the retention rule of the layer that keeps most."""
    layers = iterate_attention(*cache_plan.spec.layers)
    widest = max(
        layers, key=lambda layer: (layer.effective_window, layer.retention.sinks), default=None
    )
    return KeepAll() if widest is None else widest.retention


def _describe_window(rule: Retention) -> str:
    sinks = f", and the first {rule.sinks}" if rule.sinks else ""
    return f"the last {rule.window} tokens stay{sinks}"


def _load_config(model: str | None, config: Path | None) -> tuple[str, Any]:
    """A name for what is planned, and its configuration."""
    if model is not None and config is not None:
        raise ValueError("--model and --config both name a model: give one of them")
    if model is not None:
        return model, load_config(model)
    if config is None:
        return "the model inside", read_config(demo.PATH)
    try:
        return str(config), read_config(config)
    except ValueError as error:
        raise ValueError(f"--config {error}") from error


def _list_supported_formats(layers: Sequence[LayerShape]) -> tuple[list[str], list[str]]:
    """The formats that can store rows of these shapes, and why the others cannot."""
    from kvant.planner import plan as planned

    specs: list[str] = []
    refused: dict[str, list[str]] = {}
    for spec in PLANNED_FORMATS:
        try:
            planned(layers, spec)
        except ValueError as error:
            refused.setdefault(str(error), []).append(spec)
        else:
            specs.append(spec)
    return specs, [f"left out: {', '.join(those)}: {why}" for why, those in refused.items()]


def _make_row(spec: str, cache_plan: Plan, raw_plan: Plan, limit: int | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "kv_cache": spec,
        "nbytes_per_token": cache_plan.nbytes_per_token,
        "nbytes_per_token_of_raw": _compute_share(
            cache_plan.nbytes_per_token, raw_plan.nbytes_per_token
        ),
        "nbytes": cache_plan.nbytes,
        "nbytes_of_raw": _compute_share(cache_plan.nbytes, raw_plan.nbytes),
        "nbytes_kept": cache_plan.nbytes_kept,
    }
    if limit is not None:
        row["largest_context"] = cache_plan.largest_context(limit)  # null: whatever it is, it fits
    return row


def _compute_share(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def _describe_layers(layers: Sequence[LayerShape]) -> str:
    """22 layers of sliding_attention (window 512), 4 of full_attention; bfloat16"""
    kinds = Counter((one.kind, one.window) for one in layers)
    told = [
        f"{count} of {kind}" + ("" if window is None else f" (window {window})")
        for (kind, window), count in kinds.items()
    ]
    first, *others = told
    words = ", ".join([first.replace(" of ", " layers of ", 1), *others])
    return f"{words}; {_format_dtype(layers[0].dtype)}"


def _format_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _make_notes(raw_plan: Plan, max_length: int | None, config: Any) -> list[str]:
    """What the numbers do not say."""
    from kvant.models import ConfigEntries, declares_dtype

    notes = []
    if raw_plan.dtypes and not declares_dtype(config):
        notes.append(
            f"assumed: rows come in {_format_dtype(raw_plan.dtypes[0])}, for the configuration "
            "names no dtype"
        )
    if max_length is not None and raw_plan.context > max_length:
        notes.append(
            f"{raw_plan.context} tokens are more than the {max_length} this model was made for"
        )
    if raw_plan.uncounted_layers:
        kinds = ", ".join(
            sorted({raw_plan.layers[index].kind for index in raw_plan.uncounted_layers})
        )
        notes.append(
            f"not counted: what {len(raw_plan.uncounted_layers)} layers of {kinds} remember, "
            "which the "
            "configuration does not tell"
        )
    fixed = sum(layer.state_nbytes or 0 for layer in raw_plan.layers) * raw_plan.sequences
    if fixed:
        notes.append(f"counted: {format_size(fixed)} of recurrent states, at every length")
    if ConfigEntries.from_model(config).get_anywhere("is_encoder_decoder"):
        notes.append("not counted: the rows of the encoder, which are as many as its input has")
    return notes


def _show_plan(
    title: str,
    rows: Sequence[dict[str, Any]],
    notes: Sequence[str],
    raw_plan: Plan,
    limit: int | None,
) -> None:
    console, table = make_table()
    times = "" if raw_plan.sequences == 1 else f"{raw_plan.sequences} x "
    table.add_column("format", no_wrap=True)
    heads = ["bytes a token", "of raw", f"{times}{raw_plan.context} tokens", "of raw"]
    heads += [] if limit is None else [f"tokens in {format_size(limit)}"]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        cells = [f"{row['nbytes_per_token']:.0f}", f"{row['nbytes_per_token_of_raw']:.4g}"]
        cells += [format_size(row["nbytes"]), f"{row['nbytes_of_raw']:.4g}"]
        if limit is not None:
            most = row["largest_context"]
            cells.append("any number" if most is None else str(most))
        table.add_row(row["kv_cache"], *cells)
    console.print(title, soft_wrap=True)
    console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True)
