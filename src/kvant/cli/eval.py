"""`kvant eval`: what each format does to a model, and what it takes, in the same run as raw."""

from __future__ import annotations

import csv as csv_text
import json as json_text
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from kvant import checkpoints
from kvant.cli import options
from kvant.cli.options import check_writable, read_text
from kvant.errors import name_path
from kvant.progress import ProgressBar
from kvant.sizes import format_size
from kvant.spec import check_words, split_specs
from kvant.tables import make_table

DEFAULT_FORMATS = "affine8,affine4,turbo4v4,turbo4v2"


def evaluate_formats(
    model: options.Model = None,
    trust_remote_code: options.TrustRemoteCode = False,
    text: Annotated[
        Path | None, Option(help="Else files of Python's library that the one inside never saw.")
    ] = None,
    formats: Annotated[
        str, Option(help="With their options, and commas between.")
    ] = DEFAULT_FORMATS,
    tokens: Annotated[int, Option(min=2, help="Of text, each predicted.")] = 16384,
    context: Annotated[int, Option(min=2, help="Tokens of a piece, at most the model's.")] = 2048,
    prompts: Annotated[
        int, Option(min=1, help="Pieces to continue, and pieces to hide and find things in.")
    ] = 8,
    device: options.Device = None,
    dtype: Annotated[
        str,
        Option(
            help="auto, bfloat16, ...; float32 is without the rounding of 16 bits, a KL of its own."
        ),
    ] = "auto",
    csv: Annotated[Path | None, Option(help="Also write a table of CSV.")] = None,
    plot: Annotated[Path | None, Option(help="Also draw divergence against bytes: F.png")] = None,
    save: Annotated[
        Path | None, Option(help="Keep each result in a file, and go on from there.")
    ] = None,
    json: options.Json = False,
) -> None:
    """What each format does to a model's predictions, and its bytes."""
    if plot is not None:
        from kvant.bench.report import check_plot

        check_plot(plot)
    _check_files({"--csv": csv, "--plot": plot, "--save": save})
    specs = {spec: spec for spec in split_specs(formats)}
    for spec in specs:
        check_words(spec)
    told = None if text is None else read_text(text, "--text")
    loaded, tokenizer = checkpoints.load(
        model, trust_code=trust_remote_code, device=device, dtype=dtype
    )
    from kvant.eval import EvaluationSettings, evaluate
    from kvant.eval.result import FormatPoint, flatten_result, plot_results
    from kvant.hf import attach

    attach(loaded)  # some attention reads stored rows only so
    settings = EvaluationSettings(tokens=tokens, context=context, prompts=prompts)
    with ProgressBar("measuring", quiet=json) as reading:
        results = evaluate(
            loaded,
            tokenizer,
            specs,
            text=told,
            settings=settings,
            save=save,
            progress=reading.update,
        )
    facts = {
        "model": model or "the model inside",
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "tokens": tokens,
        "context": context,
        "prompts": prompts,
    }
    title = f"{facts['model']}, {facts['dtype']}"
    if csv is not None:
        _write_csv(csv, [flatten_result(one) for one in results])
    if plot is not None:
        plot_results([FormatPoint.from_result(one) for one in results], title, plot)
    if json:
        print(json_text.dumps(facts | {"formats": [one.to_json() for one in results]}))
    else:
        _show_results(title, results)


def _check_files(files: Mapping[str, Path | None]) -> None:
    for flag, file in files.items():
        if file is not None:
            check_writable(file, flag)


def _write_csv(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    with name_path(file), file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv_text.DictWriter(opened, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def _show_results(title: str, results: Sequence[Any]) -> None:
    first = results[0]
    console, _ = make_table()
    shares = ", ".join(f"{kind} {share:.0%}" for kind, share in first.raw_recall_shares.items())
    console.print(
        f"{title}; raw: perplexity {first.raw_perplexity:.4g} over {first.positions} tokens, "
        f"{shares}",
        soft_wrap=True,
    )
    parts = {
        ("perplexity", "95%", "mean KL", "95%", "p99.9"): _format_predictions,
        (
            "top-1",
            f"same of {first.continued}",
            *first.recall_shares,
            "tokens/s",
            "of raw",
        ): _format_answers,
        ("bytes a token", "of raw", "at 2k", "of raw", "at 32k", "of raw"): _format_bytes,
    }
    for heads, cells in parts.items():  # each as wide as a terminal
        console, table = make_table()
        table.add_column("format", no_wrap=True)
        for head in heads:
            table.add_column(head, justify="right", no_wrap=True)
        for one in results:
            table.add_row(one.format, *cells(one))
        console.print(table)


def _format_predictions(result: Any) -> list[str]:
    low, high = result.perplexity_change_interval
    least, most = result.mean_kl_interval
    found = [f"{result.perplexity_change:+.2%}", f"{low:+.2%} {high:+.2%}"]
    return [*found, f"{result.mean_kl:.2g}", f"{least:.2g} {most:.2g}", f"{result.p999_kl:.2g}"]


def _format_answers(result: Any) -> list[str]:
    found = [f"{result.top1:.1%}", f"{result.identical:.1f}"]
    found += [f"{share:.0%}" for share in result.recall_shares.values()]
    return [*found, f"{result.tokens_s:.0f}", f"{result.vs_raw:.2f}"]


def _format_bytes(result: Any) -> list[str]:
    """Of a sealed row in all layers, and of the whole cache."""
    found = [f"{result.row_nbytes:.0f}", _format_ratio(result.row_nbytes, result.raw_row_nbytes)]
    for length, count in result.nbytes.items():
        known = count is not None
        found += (
            [format_size(count), _format_ratio(count, result.raw_nbytes[length])]
            if known
            else ["", ""]
        )
    return found


def _format_ratio(part: float, whole: float) -> str:
    return f"{part / whole if whole else 1:.3g}"
