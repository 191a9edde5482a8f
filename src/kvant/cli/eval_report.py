"""The output of `kvant eval`: rows as formats are measured, then tables and files.

All of it is also made of the formats that are finished when a run is interrupted.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from kvant.cli import StreamedTable, print_json, print_line, print_table
from kvant.errors import name_path
from kvant.platform.figures import format_kl, format_of_raw, format_top1
from kvant.platform.paths import check_writable
from kvant.platform.sizes import format_size
from kvant.platform.terminal import ProgressBar

if TYPE_CHECKING:
    from kvant.eval.result import EvaluationResult

WIDTHS = {  # of the columns after the format
    "of raw": 6,
    "perplexity": 10,
    "95%": 15,
    "mean KL": 7,
    "top-1": 6,
    "recall": 6,
    "tokens/s": 8,
}


@dataclass(frozen=True)
class OutputFiles:
    csv: Annotated[Path | None, Option(help="CSV file for a table of the results.")] = None
    plot: Annotated[
        Path | None, Option(help="Image file for a plot of divergence against bytes: F.png.")
    ] = None
    save: Annotated[
        Path | None, Option(help="File for finished results; a run resumes after them.")
    ] = None

    def check(self) -> None:
        """Raise an error for files that cannot be written, before a model is loaded."""
        if self.plot is not None:
            from kvant.bench.harness import check_plot

            check_plot(self.plot)
        for flag, file in {"--csv": self.csv, "--plot": self.plot, "--save": self.save}.items():
            check_writable(file, flag)


class EvaluationReport:
    """The results so far of a run on `specs`; prints them unless the output is JSON."""

    def __init__(
        self,
        model: Any,
        facts: Mapping[str, Any],
        specs: Sequence[str],
        files: OutputFiles,
        *,
        is_quick: bool,
        is_json: bool,
    ) -> None:
        self.results: list[EvaluationResult] = []
        self._model, self._facts, self._specs, self._files = model, facts, specs, files
        self._title = f"{facts['model']}, {facts['dtype']}" + (", quick" if is_quick else "")
        self._is_quick, self._is_json = is_quick, is_json
        self._table = StreamedTable({"format": max(map(len, specs)), **WIDTHS})

    def add(self, result: EvaluationResult, bar: ProgressBar) -> None:
        """Add a result, and print its row; above the first, what raw does."""
        self.results.append(result)
        if self._is_json:
            return
        with bar.hide():
            if len(self.results) == 1:
                print_line(self._describe_raw(result))
                self._table.print_row(self._table.headings)
            self._table.print_row(self._format_row(result))

    def describe_progress(self) -> str:
        text = f"{len(self.results)} of {len(self._specs)} formats measured"
        if self.results and self._files.save is not None:
            text += f"; the same command goes on from {self._files.save}"
        return text

    def finish(self) -> None:
        """Print the JSON object or the tables that rows had no room for, and write the files."""
        results = self.results
        try:  # a full disk does not lose what is printed, a closed pipe not the files
            if self._is_json:
                formats = [result.to_json() for result in results]
                print_json({**self._facts, "formats": formats})
            elif results:
                self._print_tables()
                if self._is_quick:
                    print_line(self._describe_precision())
        finally:
            if results:
                self._write_files()

    def _describe_raw(self, result: EvaluationResult) -> str:
        from kvant.planner import find_default_context

        shares = "".join(f", {kind} {x:.0%}" for kind, x in result.raw_recall_shares.items())
        return (
            f"{self._title}; raw: perplexity {result.raw_perplexity:.4g} over {result.positions} "
            f"tokens{shares}; of raw: at {find_default_context(self._model):,} tokens"
        )

    def _format_row(self, result: EvaluationResult) -> list[str]:
        from kvant.planner import compute_share_of_raw

        low, high = result.perplexity_change_interval
        return [
            result.format,
            format_of_raw(compute_share_of_raw(self._model, result.format)),
            f"{result.perplexity_change:+.2%}",
            f"{low:+.2%} {high:+.2%}",
            format_kl(result.mean_kl),
            format_top1(result.top1),
            f"{result.recall_share:.0%}",
            f"{result.tokens_s:.0f}",
        ]

    def _write_files(self) -> None:
        from kvant.eval.result import FormatPoint, flatten_result, plot_results

        files, results = self._files, self.results
        if files.csv is not None:
            rows = [flatten_result(result) for result in results]
            with name_path(files.csv), files.csv.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)
        if files.plot is not None:
            points = [FormatPoint.from_result(result) for result in results]
            plot_results(points, self._title, files.plot)

    def _print_tables(self) -> None:
        first = self.results[0]
        details = ("mean KL, 95%", "p99.9", f"same of {first.continued}", *first.recall_shares)
        tables = {
            (*details, "speed/raw"): _format_details,
            ("bytes a token", "of raw", "at 2k", "of raw", "at 32k", "of raw"): _format_bytes,
        }
        for headings, format_cells in tables.items():  # split so that each fits a terminal
            print_table(
                ["format", *(f">{heading}" for heading in headings)],
                [(result.format, *format_cells(result)) for result in self.results],
            )

    def _describe_precision(self) -> str:
        intervals = [result.perplexity_change_interval for result in self.results]
        within = max(high - low for low, high in intervals) / 2
        answers = self._facts["prompts"] * sum(map(len, self.results[0].recall.values()))
        return (
            f"quick: perplexity changes are known to within {within:.2%} (95%), and recall is of "
            f"{answers} answers; leave out --quick to narrow both"
        )


def _format_details(result: EvaluationResult) -> list[str]:
    """Format the tail of the KL, the continuations, the recall by kind, and the speed."""
    low, high = result.mean_kl_interval
    cells = [f"{format_kl(low)} {format_kl(high)}", format_kl(result.p999_kl)]
    cells += [f"{result.identical:.1f}"]
    cells += [f"{share:.0%}" for share in result.recall_shares.values()]
    return [*cells, f"{result.vs_raw:.2f}"]


def _format_bytes(result: EvaluationResult) -> list[str]:
    """Format the bytes of a sealed row in all layers, and of the cache at each length."""
    cells = [f"{result.row_nbytes:.0f}", _compare(result.row_nbytes, result.raw_row_nbytes)]
    for length, nbytes in result.nbytes.items():
        if nbytes is None:
            cells += ["", ""]
        else:
            cells += [format_size(nbytes), _compare(nbytes, result.raw_nbytes[length])]
    return cells


def _compare(part: float, whole: float | None) -> str:
    return format_of_raw(part / whole if whole else 1)
