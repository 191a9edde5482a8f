"""`kvant formats`: list the formats and options of specs, or explain one spec. Loads no model."""

from __future__ import annotations

import json as json_text
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from kvant.cli import options
from kvant.platform.sizes import format_size
from kvant.platform.tables import make_table
from kvant.spec.auto import check_spec_or_auto, is_auto
from kvant.spec.formats import SideFormat, parse_format
from kvant.spec.options import parse_options
from kvant.spec.word_list import AUTO_WORD, FORMAT_WORDS, OPTION_WORDS, SpecWord

if TYPE_CHECKING:
    from kvant.planner import Plan

HEADS, DIM = 8, 128  # of the example layer
EXAMPLE_LAYER_TEXT = "a layer of 8 heads of 128 in bfloat16"
EXAMPLE_LENGTHS = (1024, 8192, 32768)  # tokens
MORE_HELP = (
    "A spec is a format and options, separated by commas: affine4,window=4096.\n"
    "kvant formats SPEC explains a spec; kvant plan computes the memory of a model; kvant eval\n"
    "measures its quality; docs/formats.md helps to choose."
)


def formats(
    spec: Annotated[
        str | None, Argument(help="A spec to explain, such as affine4,sinks=4.")
    ] = None,
    json: options.Json = False,
) -> None:
    """List the formats and options of --kv-cache, or explain one spec."""
    report = _describe_language() if spec is None else _explain_spec(spec)
    if json:
        print(json_text.dumps(report))
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
    }


def _explain_spec(spec: str) -> dict[str, Any]:
    check_spec_or_auto(spec)
    if is_auto(spec):
        return {"spec": spec, "words": {AUTO_WORD.word: AUTO_WORD.meaning}, "lengths": []}
    first, *rest = (word.strip() for word in spec.split(","))
    side_formats = parse_format(first)
    words = _explain_sides(side_formats.keys, side_formats.values)
    words |= {word: _explain_option(word) for word in rest}
    options = parse_options(rest)
    inner_spec = ",".join(word for word in (first, *rest) if not word.startswith("edge="))
    lengths = []
    for length in sorted(
        {min(length, options.get("capacity", length)) for length in EXAMPLE_LENGTHS}
    ):
        layer_plan, raw_nbytes = _plan_layer(inner_spec, length), _plan_layer("raw", length).nbytes
        row = {
            "tokens": length,
            "nbytes": layer_plan.nbytes,
            "of_raw": layer_plan.nbytes / raw_nbytes,
        }
        if "prune" in options:
            row |= {
                "nbytes_kept": layer_plan.nbytes_kept,
                "kept_of_raw": layer_plan.nbytes_kept / raw_nbytes,
            }
        lengths.append(row)
    return {
        "spec": spec,
        "words": words,
        "nbytes_per_token": _plan_layer(first, EXAMPLE_LENGTHS[0]).nbytes_per_token,
        "layer": EXAMPLE_LAYER_TEXT,
        "lengths": lengths,
    }


def _explain_option(word: str) -> str:
    """Return the meaning of an option, with a plain number in place of its N."""
    name, _, value = word.partition("=")
    meaning = next(
        option.meaning for option in OPTION_WORDS if option.word.partition("=")[0] == name
    )
    return meaning.replace("N", value) if value.isdecimal() else meaning


def _plan_layer(spec: str, context: int) -> Plan:
    from kvant.models.shapes import Shape
    from kvant.planner import plan

    return plan(Shape(1, HEADS, DIM, DIM), spec, context=context)


def _explain_sides(keys: SideFormat, values: SideFormat) -> dict[str, str]:
    if keys == values:
        return {keys.word: _find_format_word(keys).meaning}
    return {
        f"keys {keys.word}": _find_format_word(keys).meaning,
        f"values {values.word}": _find_format_word(values).meaning,
    }


def _find_format_word(side: SideFormat) -> SpecWord:
    """Return the entry of a format, or that of its family and width: aura4 is turbo4."""
    by_word = {format_word.word: format_word for format_word in FORMAT_WORDS}
    family = "bf16" if side.dtype else f"{side.family}{side.bits or ''}"
    custom = SpecWord(side.word, "a custom codec", "")
    return by_word.get(side.word) or by_word.get(family) or custom


def _show_language(report: dict[str, Any]) -> None:
    console, table = make_table()
    table.add_column("format", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("of raw", justify="right", no_wrap=True)
    table.add_column("what it is")
    for row in report["formats"]:
        table.add_row(
            row["format"], f"{row['nbytes_per_token']:.0f}", f"{row['of_raw']:.3g}", row["what"]
        )
    table.add_row("auto", "", "", AUTO_WORD.meaning)
    console.print(f"bytes: of a token in {report['layer']}", soft_wrap=True)
    console.print(table)
    _, table = make_table()
    for heading in ("option", "default"):
        table.add_column(heading, no_wrap=True)
    table.add_column("what it does")
    for row in report["options"]:
        table.add_row(row["option"], row["default"], row["what"])
    console.print(table)
    console.print(MORE_HELP, soft_wrap=True)


def _show_spec(report: dict[str, Any]) -> None:
    console, table = make_table()
    table.show_header = False
    for word, meaning in report["words"].items():
        table.add_row(word, meaning)
    console.print(table)
    if not report["lengths"]:
        return
    size = f"{report['nbytes_per_token']:.0f}"
    console.print(f"{size} bytes per sealed token in {report['layer']}", soft_wrap=True)
    if any(word.startswith("edge=") for word in report["words"]):
        console.print("the table leaves out the first and last layers (edge=)", soft_wrap=True)
    _, table = make_table()
    pruned = ("after prefill", "of raw") if "nbytes_kept" in report["lengths"][0] else ()
    for heading in ("tokens", "memory a layer", "of raw", *pruned):
        table.add_column(heading, justify="right")
    for row in report["lengths"]:
        cells = [format_size(row["nbytes"]), f"{row['of_raw']:.3g}"]
        if pruned:
            cells += [format_size(row["nbytes_kept"]), f"{row['kept_of_raw']:.3g}"]
        table.add_row(str(row["tokens"]), *cells)
    console.print(table)
