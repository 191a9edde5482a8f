"""`kvant formats` and `kvant plan`: what a spec means, and the bytes that it takes.

`formats` lists the formats and options, or explains one spec. `plan` computes the bytes of a
model's cache in each format. It reads the model's configuration only; a config.json does not even
need transformers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from kvant import demo
from kvant.checkpoints import find_gguf, load_config, read_config
from kvant.cli import options, print_json, print_line, print_table
from kvant.platform.sizes import format_size, parse_size
from kvant.platform.terminal import make_table
from kvant.recipes import AnySpec, iterate_attention
from kvant.retention import KeepAll
from kvant.spec.formats import AUTO_WORD, FORMAT_WORDS, FormatWord, LayerFormat, SideFormat
from kvant.spec.language import check_spec_or_auto, is_auto, parse_main_layer, parse_words
from kvant.spec.options import OPTION_WORDS
from kvant.spec.tables import CODEC_TABLE, TABLES
from kvant.stores.open import STORE_TABLE

if TYPE_CHECKING:
    import torch

    from kvant.models.shapes import LayerShape
    from kvant.planner import Plan
    from kvant.retention import Retention

HEADS, DIM = 8, 128  # of the example layer
EXAMPLE_LAYER_TEXT = "a layer of 8 heads of 128 in bfloat16"
EXAMPLE_LENGTHS = (1024, 8192, 32768)  # tokens
MORE_HELP = (
    "A spec is a format and options, separated by commas: affine4,window=4096.\n"
    "kvant formats SPEC explains a spec; kvant plan computes the memory of a model; kvant eval\n"
    "measures its quality; docs/formats.md helps to choose."
)


RAW = "raw"
PLANNED_FORMATS = (
    RAW,
    "affine8",
    "affine8v4",
    "affine6",
    "affine5",
    "affine4",
    "turbo4v4",
    "turbo4v2",
    "turbo3",
)


def formats(
    spec: Annotated[
        str | None, Argument(help="A spec to explain, such as affine4,sinks=4.")
    ] = None,
    json: options.Json = False,
) -> None:
    """List formats and options, or explain one spec."""
    report = _describe_language() if spec is None else _explain_spec(spec)
    if json:
        print_json(report)
    elif spec is None:
        _show_language(report)
    else:
        _show_spec(report)


def _describe_language() -> dict[str, Any]:
    raw = FORMAT_WORDS[0]
    return {
        "layer": EXAMPLE_LAYER_TEXT,
        "formats": [
            {"format": word.word, "nbytes_per_token": HEADS * DIM * word.bits / 8}
            | {"of_raw": word.bits / raw.bits, "what": word.meaning, "use": word.use_case}
            for word in FORMAT_WORDS
        ],
        "options": [
            {"option": word.word, "default": word.default}
            | {"what": word.meaning, "use": word.use_case}
            for word in OPTION_WORDS
        ],
        "auto": AUTO_WORD.meaning,
        "extensions": [
            {"kind": kind, "name": name, "package": None if package is None else str(package)}
            | {"fault": fault}
            for table in (*TABLES.values(), STORE_TABLE)
            for kind, name, package, fault in table.list_extensions()
        ],
    }


def _explain_spec(spec: str) -> dict[str, Any]:
    check_spec_or_auto(spec)
    if is_auto(spec):
        return {"spec": spec, "words": {AUTO_WORD.word: AUTO_WORD.meaning}, "lengths": []}
    _, *rest = (word.strip() for word in spec.split(","))
    main, _, _, runs, options = parse_words(spec)
    words = _explain_format(main)
    words |= {word: _explain_option(word) for word in rest if not word.startswith("layers=")}
    for run in runs:
        name = f"layer {run.first}" if run.first == run.last else f"layers {run.first}-{run.last}"
        words |= {f"{name}: {side}": text for side, text in _explain_format(run.format).items()}
    main_layer = parse_main_layer(spec)
    capacity = options.get("capacity", EXAMPLE_LENGTHS[-1])
    lengths = []
    for length in sorted({min(length, capacity) for length in EXAMPLE_LENGTHS}):
        layer_plan, raw_nbytes = _plan_layer(main_layer, length), _plan_layer("raw", length).nbytes
        row = {"tokens": length, "nbytes": layer_plan.nbytes}
        row["of_raw"] = layer_plan.nbytes / raw_nbytes
        if "prune" in options:
            row["nbytes_kept"] = layer_plan.nbytes_kept
            row["kept_of_raw"] = layer_plan.nbytes_kept / raw_nbytes
        lengths.append(row)
    return {
        "spec": spec,
        "words": words,
        "nbytes_per_token": _plan_layer(main_layer, 0).row_nbytes[0],
        "saves_from": _plan_layer(main_layer, 1).find_saving_length(),
        "layer": EXAMPLE_LAYER_TEXT,
        "lengths": lengths,
    }


def _explain_format(layer_format: LayerFormat) -> dict[str, str]:
    """Return the meaning of a format, or of each side if they differ."""
    keys, values = layer_format.keys, layer_format.values
    if keys == values:
        return {keys.word: _find_format_word(keys).meaning}
    sides = {f"keys {keys.word}": keys, f"values {values.word}": values}
    return {name: _find_format_word(side).meaning for name, side in sides.items()}


def _explain_option(word: str) -> str:
    """Return the meaning of an option, with a plain number in place of its N."""
    name, _, value = word.partition("=")
    meaning = next(
        option.meaning for option in OPTION_WORDS if option.word.partition("=")[0] == name
    )
    return meaning.replace("N", value) if value.isdecimal() else meaning


def _plan_layer(spec: AnySpec, context: int) -> Plan:
    from kvant.models.shapes import Shape
    from kvant.planner import plan as plan_cache

    return plan_cache(Shape(1, HEADS, DIM, DIM), spec, context=context)


def _find_format_word(side: SideFormat) -> FormatWord:
    """Return the entry of a format, or that of its family and width: aura4 is turbo4."""
    by_word = {format_word.word: format_word for format_word in FORMAT_WORDS}
    family = "bf16" if side.dtype else f"{side.family}{side.bits or ''}"
    return by_word.get(side.word) or by_word.get(family) or _describe_codec(side.word)


def _describe_codec(word: str) -> FormatWord:
    """Describe a codec that is not kvant's own: its package, and its docstring's first line."""
    package = next(x.package for x in CODEC_TABLE.list_extensions() if x.name == word)
    summary = (getdoc(CODEC_TABLE[word]) or "").partition("\n")[0]
    source = "a registered codec" if package is None else f"a codec of {package}"
    return FormatWord(word, 0.0, f"{source}: {summary}" if summary else source, "")


def _show_language(report: dict[str, Any]) -> None:
    rows = [
        (row["format"], f"{row['nbytes_per_token']:.0f}", f"{row['of_raw']:.3g}", row["what"])
        for row in report["formats"]
    ]
    print_line(f"bytes: of a token in {report['layer']}")
    print_table(
        ("format", ">bytes", ">of raw", "what it is"),
        [*rows, ("auto", "", "", AUTO_WORD.meaning)],
        wrapped=["what it is"],
    )
    print_table(
        ("option", "default", "what it does"),
        [(row["option"], row["default"], row["what"]) for row in report["options"]],
        wrapped=["what it does"],
    )
    if report["extensions"]:
        print_table(
            ("extension", "name", "package", "not used, since"),
            [[cell or "" for cell in extension.values()] for extension in report["extensions"]],
        )
    print_line(MORE_HELP)


def _show_spec(report: dict[str, Any]) -> None:
    console, table = make_table()
    table.show_header = False
    for word, meaning in report["words"].items():
        table.add_row(word, meaning)
    console.print(table)
    if not report["lengths"]:
        return
    size = f"{report['nbytes_per_token']:.0f}"
    print_line(f"{size} bytes per sealed token in {report['layer']}")
    if report["saves_from"] is not None:
        print_line(f"less memory than raw rows from {report['saves_from']} tokens on")
    if any(word.startswith("edge=") for word in report["words"]):
        print_line("the table leaves out the first and last layers (edge=)")
    if any(word.startswith("layer") for word in report["words"]):
        print_line("the table leaves out the layers in formats of their own (layers=)")
    headings = [">tokens", ">memory a layer", ">of raw"]
    if "nbytes_kept" in report["lengths"][0]:
        headings += [">after prefill", ">of raw"]
    rows = []
    for length in report["lengths"]:
        cells = [str(length["tokens"])]
        cells += [format_size(length["nbytes"]), f"{length['of_raw']:.3g}"]
        if "nbytes_kept" in length:
            cells += [format_size(length["nbytes_kept"]), f"{length['kept_of_raw']:.3g}"]
        rows.append(cells)
    print_table(headings, rows)


# ---- kvant plan


def plan(
    model: options.Model = None,
    config: Annotated[
        Path | None, Option(help="Path of a config.json, instead of --model.")
    ] = None,
    context: Annotated[int | None, Option(min=1, help="Tokens per sequence.")] = None,
    sequences: Annotated[int, Option(min=1, help="Number of sequences.")] = 1,
    budget: Annotated[
        str | None,
        Option(help="Memory, such as 8GiB, for the cache (and --weights): shows what fits."),
    ] = None,
    kv_cache: Annotated[list[str] | None, Option(help="Spec to plan; may be repeated.")] = None,
    weights: Annotated[
        str | None,
        Option(
            help="Count weights too, in the budget as well: raw, affine8, affine4, or by layer."
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Compute the bytes of a model's cache in each format."""
    limit = None if budget is None else parse_size(budget)
    for spec in kv_cache or []:
        check_spec_or_auto(spec)
    from kvant.models import layer_shapes, max_context
    from kvant.planner import count_weights
    from kvant.planner import plan as plan_cache

    name, model_config = _load_config(model, config)
    source = model_config if model is None or find_gguf(model) is None else model
    weight_nbytes = 0 if weights is None else count_weights(source, weights)
    room = None if limit is None else limit - weight_nbytes
    if room is not None and room <= 0:
        raise ValueError(
            f"--budget {budget}: the weights take {format_size(weight_nbytes)} in {weights}; give "
            "more memory, or weights of fewer bits"
        )
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
    rows = [_make_row(spec, cache_plan, raw_plan, room) for spec, cache_plan in plan_by_spec]
    notes = _make_notes(raw_plan, max_length, model_config) + unsupported
    if weights is not None:
        notes.append(f"weights in {weights}: {format_size(weight_nbytes)}")
    notes += [
        f"{spec}: {format_size(cache_plan.nbytes_kept)} after prefill of {context} tokens"
        for spec, cache_plan in plan_by_spec
        if cache_plan.nbytes_kept < cache_plan.nbytes
    ]
    model_rule = _find_widest_rule(raw_plan)
    for spec, rule in zip(specs, map(_find_widest_rule, plans), strict=True):
        if rule.window is not None and rule != model_rule:
            sinks = f" and the first {rule.sinks}" if rule.sinks else ""
            notes.append(f"{spec}: stores the last {rule.window} tokens{sinks}")
    if limit is not None and max_length is not None:
        largest = {row["kv_cache"]: row["largest_context"] for row in rows}
        roomy = [spec for spec, count in largest.items() if count is None or count > max_length]
        note = f"{', '.join(roomy)}: more tokens fit than the {max_length} this model supports"
        notes += [note] if roomy else []
    notes += [
        f"{spec}: chosen by tests on the model, which kvant run --kv-cache {spec} does"
        for spec in auto_specs
    ]
    if json:
        report = {"model": name, "context": raw_plan.context, "sequences": sequences}
        report |= {"dtype": _format_dtype(layers[0].dtype), "max_context": max_length}
        report |= {"budget": limit, "layers": len(layers)}
        report |= {"weights": weights, "weight_nbytes": weight_nbytes or None}
        report |= {"uncounted": raw_plan.uncounted_layers, "notes": notes, "formats": rows}
        print_json(report)
    else:
        _show_plan(f"{name}: {_describe_layers(layers)}", rows, notes, raw_plan, limit)


def _find_widest_rule(cache_plan: Plan) -> Retention:
    """Return the retention rule of the layer that stores the most tokens."""
    layers = iterate_attention(*cache_plan.spec.layers)
    widest = max(
        layers, key=lambda layer: (layer.effective_window, layer.retention.sinks), default=None
    )
    return KeepAll() if widest is None else widest.retention


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
    row: dict[str, Any] = {"kv_cache": spec}
    for name in ("nbytes_per_token", "nbytes"):
        value, raw_value = getattr(cache_plan, name), getattr(raw_plan, name)
        row |= {name: value, f"{name}_of_raw": value / raw_value if raw_value else 1.0}
    row["nbytes_kept"] = cache_plan.nbytes_kept
    if limit is not None:
        row["largest_context"] = cache_plan.largest_context(limit)  # null: any context fits
    return row


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
    times = "" if raw_plan.sequences == 1 else f"{raw_plan.sequences} x "
    headings = ["format", ">bytes a token", ">of raw", f">{times}{raw_plan.context} tokens"]
    headings += [">of raw"] + ([] if limit is None else [f">tokens in {format_size(limit)}"])
    table_rows = []
    for row in rows:
        cells = [row["kv_cache"], f"{row['nbytes_per_token']:.0f}"]
        cells += [f"{row['nbytes_per_token_of_raw']:.4g}", format_size(row["nbytes"])]
        cells.append(f"{row['nbytes_of_raw']:.4g}")
        if limit is not None:
            largest = row["largest_context"]
            cells.append("any number" if largest is None else str(largest))
        table_rows.append(cells)
    print_line(title)
    print_table(headings, table_rows)
    for note in notes:
        print_line(note)
