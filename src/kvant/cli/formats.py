"""`kvant formats`: the language of specs, and what one spec means. Loads no model."""

from __future__ import annotations

import json as json_text
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from kvant.cli import options
from kvant.sizes import format_size
from kvant.spec.auto import check_spec_or_auto, is_auto
from kvant.spec.formats import SideFormat, parse_format
from kvant.spec.options import parse_options
from kvant.spec.word_list import AUTO_WORD, FORMAT_WORDS, OPTION_WORDS, SpecWord
from kvant.tables import make_table

if TYPE_CHECKING:
    from kvant.planner import Plan

HEADS, DIM = 8, 128  # of the layer whose bytes are shown
EXAMPLE_LAYER_TEXT = "a layer of 8 heads of 128 in bfloat16"
EXAMPLE_LENGTHS = (1024, 8192, 32768)  # tokens
MORE_HELP = (
    "A spec is a format and options with commas between: affine4,window=4096.\n"
    "kvant formats SPEC explains one; kvant plan computes the memory of a model; kvant eval tells\n"
    "what formats do to it; docs/formats.md says when to use what."
)


def formats(
    spec: Annotated[
        str | None, Argument(help="A spec to explain, such as affine4,sinks=4.")
    ] = None,
    json: options.Json = False,
) -> None:
    """List the formats and options of --kv-cache, or explain one spec."""
    told = _describe_language() if spec is None else _explain_spec(spec)
    if json:
        print(json_text.dumps(told))
    elif spec is None:
        _show_language(told)
    else:
        _show_spec(told)


def _describe_language() -> dict[str, Any]:
    raw = FORMAT_WORDS[0]
    return {
        "layer": EXAMPLE_LAYER_TEXT,
        "formats": [
            {"format": one.word, "nbytes_per_token": HEADS * DIM * one.bits / 8}
            | {"of_raw": one.bits / raw.bits, "what": one.meaning, "use": one.use_case}
            for one in FORMAT_WORDS
        ],
        "options": [
            {"option": one.word, "default": one.default, "what": one.meaning, "use": one.use_case}
            for one in OPTION_WORDS
        ],
        "auto": AUTO_WORD.meaning,
    }


def _explain_spec(spec: str) -> dict[str, Any]:
    check_spec_or_auto(spec)
    if is_auto(spec):
        return {"spec": spec, "words": {AUTO_WORD.word: AUTO_WORD.meaning}, "lengths": []}
    first, *rest = (word.strip() for word in spec.split(","))
    form = parse_format(first)
    words = _explain_sides(form.keys, form.values)
    words |= {word: _explain_option(word) for word in rest}
    options = parse_options(rest)
    inner = ",".join(word for word in (first, *rest) if not word.startswith("edge="))
    lengths = []
    for length in sorted(
        {min(length, options.get("capacity", length)) for length in EXAMPLE_LENGTHS}
    ):
        one, raw = _plan_layer(inner, length), _plan_layer("raw", length).nbytes
        line = {"tokens": length, "nbytes": one.nbytes, "of_raw": one.nbytes / raw}
        if "prune" in options:
            line |= {"nbytes_kept": one.nbytes_kept, "kept_of_raw": one.nbytes_kept / raw}
        lengths.append(line)
    return {
        "spec": spec,
        "words": words,
        "nbytes_per_token": _plan_layer(first, EXAMPLE_LENGTHS[0]).nbytes_per_token,
        "layer": EXAMPLE_LAYER_TEXT,
        "lengths": lengths,
    }


def _explain_option(word: str) -> str:
    """What it does, with its number in it where that is all it has."""
    name, _, value = word.partition("=")
    what = next(one.meaning for one in OPTION_WORDS if one.word.partition("=")[0] == name)
    return what.replace("N", value) if value.isdecimal() else what


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
    """A word of its own, or that of its family and width: aura4 is turbo4."""
    known = {one.word: one for one in FORMAT_WORDS}
    family = "bf16" if side.dtype else f"{side.family}{side.bits or ''}"
    return (
        known.get(side.word) or known.get(family) or SpecWord(side.word, "a codec of your own", "")
    )


def _show_language(report: dict[str, Any]) -> None:
    console, table = make_table()
    table.add_column("format", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("of raw", justify="right", no_wrap=True)
    table.add_column("what it is")
    for one in report["formats"]:
        table.add_row(
            one["format"], f"{one['nbytes_per_token']:.0f}", f"{one['of_raw']:.3g}", one["what"]
        )
    table.add_row("auto", "", "", AUTO_WORD.meaning)
    console.print(f"bytes: of a token in {report['layer']}", soft_wrap=True)
    console.print(table)
    _, table = make_table()
    for head in ("option", "default"):
        table.add_column(head, no_wrap=True)
    table.add_column("what it does")
    for one in report["options"]:
        table.add_row(one["option"], one["default"], one["what"])
    console.print(table)
    console.print(MORE_HELP, soft_wrap=True)


def _show_spec(report: dict[str, Any]) -> None:
    console, table = make_table()
    table.show_header = False
    for word, what in report["words"].items():
        table.add_row(word, what)
    console.print(table)
    if not report["lengths"]:
        return
    size = f"{report['nbytes_per_token']:.0f}"
    console.print(f"{size} bytes a sealed token in {report['layer']}", soft_wrap=True)
    if any(word.startswith("edge=") for word in report["words"]):
        console.print("the first and last layers are not in this table", soft_wrap=True)
    _, table = make_table()
    pruned = ("once a prompt is read", "of raw") if "nbytes_kept" in report["lengths"][0] else ()
    for head in ("tokens", "memory a layer", "of raw", *pruned):
        table.add_column(head, justify="right")
    for one in report["lengths"]:
        cells = [format_size(one["nbytes"]), f"{one['of_raw']:.3g}"]
        if pruned:
            cells += [format_size(one["nbytes_kept"]), f"{one['kept_of_raw']:.3g}"]
        table.add_row(str(one["tokens"]), *cells)
    console.print(table)
