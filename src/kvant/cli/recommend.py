"""`kvant recommend`: which format to take for a model, and what was seen of each."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from typer import Option

from kvant.cli import StreamedTable, options, print_json, print_line
from kvant.cli.options import PackedModelOptions, expand_options
from kvant.platform.figures import format_kl, format_lost, format_of_raw, format_top1
from kvant.platform.sizes import format_size, parse_size
from kvant.spec import split_specs
from kvant.spec.language import parse_words

if TYPE_CHECKING:
    from kvant.eval.recommend import ComparedFormat

WIDTHS = {  # of the columns after the format
    "bytes": 10,
    "of raw": 6,
    "mean KL": 7,
    "top-1": 6,
    "recall lost": 11,
    "reply same": 10,
    "tokens/s": 8,
}


@expand_options
def recommend(
    model_options: PackedModelOptions,
    context: Annotated[
        int | None,
        Option(min=1, help="Tokens whose bytes are compared; default: 8192, or the model's."),
    ] = None,
    budget: Annotated[
        str | None, Option(help="Limit on the bytes of a cache at that context: 512MiB.")
    ] = None,
    formats: Annotated[
        str | None, Option(help="Comma-separated specs to compare with raw; default: ten formats.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Compare formats on a model, and say which one to take."""
    max_bytes = None if budget is None else parse_size(budget)
    words = [] if formats is None else split_specs(formats)
    for word in words:
        parse_words(word)  # `auto` is what this command finds out
    model, tokenizer = model_options.load()
    from kvant.eval.recommend import COMPARED_SPECS, recommend
    from kvant.hf import attach

    attach(model)  # some attention modules read compressed rows only when attached

    specs = ("raw", *(word for word in words if word != "raw")) if words else COMPARED_SPECS
    table = StreamedTable({"format": max(map(len, specs)), **WIDTHS})

    def show(row: ComparedFormat) -> None:
        if not json:
            table.print_row(_format_cells(row))

    if not json:
        table.print_row(table.headings)
    result = recommend(
        model, tokenizer, context=context, budget=max_bytes, specs=specs, on_format=show
    )
    if json:
        print_json(asdict(result) | {"why": result.explain()})
        return
    print_line("")
    print_line(result.explain())
    if result.spec is not None:
        name = "" if model_options.model is None else f" --model {model_options.model}"
        print_line(f"try it: kvant run{name} --kv-cache {result.spec}")


def _format_cells(row: ComparedFormat) -> tuple[str, ...]:
    verdict = row.verdict if row.fits else f"{row.verdict}; exceeds the budget"
    return (
        row.spec,
        format_size(row.nbytes),
        format_of_raw(row.of_raw),
        format_kl(row.mean_kl),
        format_top1(row.top1),
        format_lost(row.lost),
        format_top1(row.reply_same),
        f"{row.tokens_per_second:.0f}",
        verdict.partition(":")[0],
    )
