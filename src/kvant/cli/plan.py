"""`kvant plan`: compute the bytes of a model's cache in each format, without loading the model.

Reads the model's configuration only; a config.json does not even need transformers.
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
from kvant.platform.sizes import format_size, parse_size
from kvant.platform.tables import make_table
from kvant.recipes import iterate_attention
from kvant.retention import KeepAll
from kvant.spec.auto import check_spec_or_auto, is_auto

if TYPE_CHECKING:
    import torch

    from kvant.models.shapes import LayerShape
    from kvant.planner import Plan
    from kvant.retention import Retention

RAW = "raw"
PLANNED_FORMATS = (
    RAW,
    "affine8",
    "fp8",
    "affine6",
    "affine8v4",
    "affine4",
    "turbo4v4",
    "turbo4v2",
    "turbo3",
)


def plan(
    model: options.Model = None,
    config: Annotated[
        Path | None, Option(help="Path of a config.json, instead of --model.")
    ] = None,
    context: Annotated[int | None, Option(min=1, help="Tokens per sequence.")] = None,
    sequences: Annotated[int, Option(min=1, help="Number of sequences.")] = 1,
    budget: Annotated[
        str | None, Option(help="Memory for the cache, such as 8GiB: shows the tokens that fit.")
    ] = None,
    kv_cache: Annotated[list[str] | None, Option(help="Spec to plan; may be repeated.")] = None,
    json: options.Json = False,
) -> None:
    """Compute the bytes of a model's cache in each format."""
    limit = None if budget is None else parse_size(budget)
    for spec in kv_cache or []:
        check_spec_or_auto(spec)
    from kvant.models import layer_shapes, max_context
    from kvant.planner import plan as plan_cache

    name, model_config = _load_config(model, config)
    layers, max_length = layer_shapes(model_config), max_context(model_config)
    auto_specs = [spec for spec in kv_cache or [] if is_auto(spec)]
    fixed_specs = [spec for spec in kv_cache or [] if not is_auto(spec)]
    specs, unsupported = (fixed_specs, []) if fixed_specs else _list_supported_formats(layers)
    if context is None:  # the longest context that every format has room for
        context = min(plan_cache(layers, spec).context for spec in specs)
        context = context if max_length is None else min(context, max_length)
    raw_plan = plan_cache(layers, RAW, context=context, sequences=sequences)
    plans = [plan_cache(layers, spec, context=context, sequences=sequences) for spec in specs]
    plan_by_spec = [*zip(specs, plans, strict=True)]
    rows = [_make_row(spec, cache_plan, raw_plan, limit) for spec, cache_plan in plan_by_spec]
    notes = _make_notes(raw_plan, max_length, model_config) + unsupported
    notes += [
        f"{spec}: {format_size(cache_plan.nbytes_kept)} after prefill of {context} tokens"
        for spec, cache_plan in plan_by_spec
        if cache_plan.nbytes_kept < cache_plan.nbytes
    ]
    notes += [
        f"{spec}: {_describe_window(rule)}"
        for spec, rule in zip(specs, map(_find_widest_rule, plans), strict=True)
        if rule.window is not None and rule != _find_widest_rule(raw_plan)  # not the model's window
    ]
    notes += _make_budget_notes(rows, limit, max_length)
    notes += [
        f"{spec}: chosen by tests on the model, which kvant run --kv-cache {spec} does"
        for spec in auto_specs
    ]
    if json:
        report = {"model": name, "context": raw_plan.context, "sequences": sequences}
        report |= {
            "dtype": _format_dtype(layers[0].dtype),
            "max_context": max_length,
            "budget": limit,
            "layers": len(layers),
        }
        report |= {"uncounted": raw_plan.uncounted_layers, "notes": notes, "formats": rows}
        print(json_text.dumps(report))
    else:
        _show_plan(f"{name}: {_describe_layers(layers)}", rows, notes, raw_plan, limit)


def _make_budget_notes(
    rows: Sequence[dict[str, Any]], limit: int | None, max_length: int | None
) -> list[str]:
    """Note the formats in which more tokens fit than the model supports."""
    if limit is None or max_length is None:
        return []
    specs = [
        row["kv_cache"]
        for row in rows
        if row["largest_context"] is None or row["largest_context"] > max_length
    ]
    note = f"{', '.join(specs)}: more tokens fit than the {max_length} this model supports"
    return [note] if specs else []


def _find_widest_rule(cache_plan: Plan) -> Retention:
    """Return the retention rule of the layer that stores the most tokens."""
    layers = iterate_attention(*cache_plan.spec.layers)
    widest = max(
        layers, key=lambda layer: (layer.effective_window, layer.retention.sinks), default=None
    )
    return KeepAll() if widest is None else widest.retention


def _describe_window(rule: Retention) -> str:
    sinks = f" and the first {rule.sinks}" if rule.sinks else ""
    return f"stores the last {rule.window} tokens{sinks}"


def _load_config(model: str | None, config: Path | None) -> tuple[str, Any]:
    """Return the name and the configuration of the model to plan for."""
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
    """Return the formats that support rows of these shapes, and notes on the others."""
    from kvant.planner import plan as plan_cache

    supported: list[str] = []
    unsupported: dict[str, list[str]] = {}  # by reason
    for spec in PLANNED_FORMATS:
        try:
            plan_cache(layers, spec)
        except ValueError as error:
            unsupported.setdefault(str(error), []).append(spec)
        else:
            supported.append(spec)
    notes = [f"left out: {', '.join(specs)}: {reason}" for reason, specs in unsupported.items()]
    return supported, notes


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
        row["largest_context"] = cache_plan.largest_context(limit)  # null: any context fits
    return row


def _compute_share(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def _describe_layers(layers: Sequence[LayerShape]) -> str:
    """Describe layers by kind: 22 layers of sliding_attention (window 512), 4 of full_attention."""
    counts = Counter((layer.kind, layer.window) for layer in layers)
    groups = [
        f"{count} of {kind}" + ("" if window is None else f" (window {window})")
        for (kind, window), count in counts.items()
    ]
    first, *others = groups
    description = ", ".join([first.replace(" of ", " layers of ", 1), *others])
    return f"{description}; {_format_dtype(layers[0].dtype)}"


def _format_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _make_notes(raw_plan: Plan, max_length: int | None, config: Any) -> list[str]:
    """Note assumptions, and bytes that the numbers leave out."""
    from kvant.models import ConfigEntries, declares_dtype

    notes = []
    if raw_plan.dtypes and not declares_dtype(config):
        notes.append(
            f"assumed: rows are {_format_dtype(raw_plan.dtypes[0])}, since the configuration "
            "names no dtype"
        )
    if max_length is not None and raw_plan.context > max_length:
        notes.append(
            f"{raw_plan.context} tokens are more than the {max_length} this model supports"
        )
    if raw_plan.uncounted_layers:
        kinds = ", ".join(
            sorted({raw_plan.layers[index].kind for index in raw_plan.uncounted_layers})
        )
        notes.append(
            f"not counted: the state of {len(raw_plan.uncounted_layers)} layers of {kinds}, whose "
            "size the configuration does not give"
        )
    state_nbytes = sum(layer.state_nbytes or 0 for layer in raw_plan.layers) * raw_plan.sequences
    if state_nbytes:
        notes.append(f"counted: {format_size(state_nbytes)} of recurrent states, at every length")
    if ConfigEntries.from_model(config).get_anywhere("is_encoder_decoder"):
        notes.append("not counted: the rows of the encoder, one per token of its input")
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
    headings = ["bytes a token", "of raw", f"{times}{raw_plan.context} tokens", "of raw"]
    headings += [] if limit is None else [f"tokens in {format_size(limit)}"]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = [f"{row['nbytes_per_token']:.0f}", f"{row['nbytes_per_token_of_raw']:.4g}"]
        cells += [format_size(row["nbytes"]), f"{row['nbytes_of_raw']:.4g}"]
        if limit is not None:
            largest = row["largest_context"]
            cells.append("any number" if largest is None else str(largest))
        table.add_row(row["kv_cache"], *cells)
    console.print(title, soft_wrap=True)
    console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True)
