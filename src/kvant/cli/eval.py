"""`kvant eval`: measure the quality and the bytes of each format, compared with raw in one run."""

from __future__ import annotations

import csv as csv_text
import json as json_text
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from kvant.cli import options, print_line, print_table
from kvant.cli.options import ModelOptions, check_writable, expand_options, read_text
from kvant.errors import name_path
from kvant.platform.sizes import format_size
from kvant.platform.terminal import ProgressBar
from kvant.spec import split_specs
from kvant.spec.language import check_spec_or_auto, is_auto

if TYPE_CHECKING:
    from kvant.eval.result import EvaluationResult

DEFAULT_FORMATS = "affine8,affine4,turbo4v4,turbo4v2"


@dataclass(frozen=True)
class EvaluatedModel(ModelOptions):
    dtype: Annotated[
        str,
        Option(help="auto, bfloat16, ...; float32 avoids 16-bit rounding, which adds to the KL."),
    ] = "auto"


@expand_options
def evaluate_formats(
    model_options: EvaluatedModel,
    text: Annotated[
        Path | None,
        Option(help="Text file to evaluate on; default: files of Python's standard library."),
    ] = None,
    formats: Annotated[str, Option(help="Comma-separated specs.")] = DEFAULT_FORMATS,
    tokens: Annotated[int, Option(min=2, help="Number of tokens of text to predict.")] = 16384,
    context: Annotated[
        int, Option(min=2, help="Tokens per piece of text, limited by the model's context.")
    ] = 2048,
    prompts: Annotated[
        int, Option(min=1, help="Number of pieces to continue, and of recall tests.")
    ] = 8,
    csv: Annotated[Path | None, Option(help="CSV file for a table of the results.")] = None,
    plot: Annotated[
        Path | None, Option(help="Image file for a plot of divergence against bytes: F.png.")
    ] = None,
    save: Annotated[
        Path | None, Option(help="File for finished results; a run resumes after them.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Measure what each format changes, and its bytes."""
    if plot is not None:
        from kvant.bench.harness import check_plot

        check_plot(plot)
    for flag, file in {"--csv": csv, "--plot": plot, "--save": save}.items():
        check_writable(file, flag)
    requested = split_specs(formats)
    for spec in requested:
        check_spec_or_auto(spec)
    evaluation_text = None if text is None else read_text(text, "--text")
    loaded, tokenizer = model_options.load()
    from kvant.eval import EvaluationSettings, evaluate
    from kvant.eval.result import FormatPoint, flatten_result, plot_results
    from kvant.hf import attach
    from kvant.probing import make_trial, resolve_auto

    attach(loaded)  # some attention modules read compressed rows only when attached
    chosen: dict[str, str] = {}  # what each `auto` stands for
    if autos := [spec for spec in requested if is_auto(spec)]:
        trial = make_trial(loaded, tokenizer)
        with ProgressBar("testing formats", quiet=json) as bar:
            chosen = {spec: str(resolve_auto(loaded, spec, trial, bar.update)) for spec in autos}
    specs = [chosen.get(spec, spec) for spec in requested]
    settings = EvaluationSettings(tokens=tokens, context=context, prompts=prompts)
    with ProgressBar("measuring", quiet=json) as bar:
        results = evaluate(
            loaded,
            tokenizer,
            {spec: spec for spec in specs},
            text=evaluation_text,
            settings=settings,
            save=save,
            progress=bar.update,
        )
    facts = {
        "model": model_options.model or "the model inside",
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "tokens": tokens,
        "context": context,
        "prompts": prompts,
        "auto": chosen,
    }
    title = f"{facts['model']}, {facts['dtype']}"
    if csv is not None:
        _write_csv(csv, [flatten_result(result) for result in results])
    if plot is not None:
        plot_results([FormatPoint.from_result(result) for result in results], title, plot)
    if json:
        print(json_text.dumps(facts | {"formats": [result.to_json() for result in results]}))
    else:
        for spec, choice in chosen.items():
            print_line(f"{spec}: {choice}")
        _show_results(title, results)


def _write_csv(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    with name_path(file), file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv_text.DictWriter(opened, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def _show_results(title: str, results: Sequence[EvaluationResult]) -> None:
    first = results[0]
    shares = ", ".join(f"{test} {share:.0%}" for test, share in first.raw_recall_shares.items())
    print_line(
        f"{title}; raw: perplexity {first.raw_perplexity:.4g} over {first.positions} tokens, "
        f"{shares}"
    )
    answers = ("top-1", f"same of {first.continued}", *first.recall_shares, "tokens/s", "of raw")
    tables = {
        ("perplexity", "95%", "mean KL", "95%", "p99.9"): _format_predictions,
        answers: _format_answers,
        ("bytes a token", "of raw", "at 2k", "of raw", "at 32k", "of raw"): _format_bytes,
    }
    for headings, format_cells in tables.items():  # split so that each fits a terminal
        print_table(
            ["format", *(f">{heading}" for heading in headings)],
            [(result.format, *format_cells(result)) for result in results],
        )


def _format_predictions(result: EvaluationResult) -> list[str]:
    low, high = result.perplexity_change_interval
    kl_low, kl_high = result.mean_kl_interval
    cells = [f"{result.perplexity_change:+.2%}", f"{low:+.2%} {high:+.2%}"]
    return [*cells, f"{result.mean_kl:.2g}", f"{kl_low:.2g} {kl_high:.2g}", f"{result.p999_kl:.2g}"]


def _format_answers(result: EvaluationResult) -> list[str]:
    cells = [f"{result.top1:.1%}", f"{result.identical:.1f}"]
    cells += [f"{share:.0%}" for share in result.recall_shares.values()]
    return [*cells, f"{result.tokens_s:.0f}", f"{result.vs_raw:.2f}"]


def _format_bytes(result: EvaluationResult) -> list[str]:
    """Format the bytes of a sealed row in all layers, and of the cache at each length."""
    cells = [f"{result.row_nbytes:.0f}", _format_ratio(result.row_nbytes, result.raw_row_nbytes)]
    for length, nbytes in result.nbytes.items():
        if nbytes is None:
            cells += ["", ""]
        else:
            cells += [format_size(nbytes), _format_ratio(nbytes, result.raw_nbytes[length])]
    return cells


def _format_ratio(part: float, whole: float | None) -> str:
    return f"{part / whole if whole else 1:.3g}"
