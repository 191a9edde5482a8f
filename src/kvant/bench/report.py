"""Benchmarks as commands: options of several, a table for people, a JSON line, and a plot."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kvant.platform.devices import describe_processor
from kvant.platform.exit_codes import run_app
from kvant.platform.tables import make_table

NUM_COLOURS = 10  # of matplotlib's colour cycle
LINE_STYLES = ("-", "--", ":")
# To the right of the plot, where it hides nothing.
LEGEND_OPTIONS: Mapping[str, Any] = {
    "loc": "upper left",
    "bbox_to_anchor": (1, 1),
    "fontsize": "small",
}
Json = Annotated[bool, typer.Option("--json", help="Print only the JSON line")]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:N; default: a GPU if there is one")
]
Plot = Annotated[Path | None, typer.Option(help="Plot the medians to F.png")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of torch")]
Model = Annotated[str | None, typer.Option(help="Folder, or name on the hub")]
Layers = Annotated[int | None, typer.Option(min=1, help="Layers of the model")]
KVCache = Annotated[str, typer.Option(help="Spec of the cache")]
Store = Annotated[str | None, typer.Option(help="Store URL; default: a temporary folder")]


def run(main: Callable[..., None]) -> None:
    """Run a benchmark as a command."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    run_app(app)


def set_threads(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)


def describe_machine(gpu: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the hardware and software that the figures depend on."""
    return {
        "processor": describe_processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **(gpu or {}),
    }


def show_progress(text: str) -> None:
    """Show one line of progress on a terminal; an empty text clears it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def parse_numbers(option: str, text: str, least: int = 0) -> list[int]:
    """Parse whole numbers separated by commas."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"--{option} {text}: whole numbers separated by commas are needed")
    if min(map(int, words)) < least:
        raise ValueError(f"--{option} {text}: each must be {least} or more")
    return [int(word) for word in words]


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print `rows`, which all have the keys of the first."""
    show_progress("")
    console, table = make_table()
    table.title, table.title_justify = title, "left"
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(format_figure(value) for value in row.values()))
    console.print(table)


def print_json(
    title: str,
    facts: Mapping[str, Any],
    *,
    quiet: bool = False,
    gpu: Mapping[str, Any] | None = None,
) -> None:
    """Print everything as one JSON line; skip it below a table on a terminal."""
    if quiet or not sys.stdout.isatty():
        print(json.dumps({"bench": title, "machine": describe_machine(gpu), **facts}))


def print_report(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
    *,
    quiet: bool,
    gpu: Mapping[str, Any] | None = None,
) -> None:
    """Print what was skipped, the table unless quiet, and the JSON line."""
    print_skipped(facts.get("skipped", ()))
    if not quiet:
        print_table(title, rows)
    print_json(title, {**facts, "rows": rows}, quiet=quiet, gpu=gpu)


def print_skipped(reasons: Iterable[str]) -> None:
    show_progress("")
    for reason in reasons:
        print(f"skipped: {reason}", file=sys.stderr)


def format_figure(value: Any) -> str:
    """Format one figure."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.2f}"  # ratios near 1 need 2 digits


def check_plot(file: Path | None) -> None:
    """Raise before a measurement if a plot is requested that cannot be drawn."""
    if file is None:
        return
    if file.is_dir() or not file.parent.is_dir():
        raise ValueError(f"--plot {file}: the name of a file in an existing folder is needed")
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib, or 'kvant[plot]'")


def group_curves(
    rows: Iterable[Mapping[str, Any]], label: Callable[[Mapping[str, Any]], str], length: str
) -> dict[str, dict[int, float]]:
    """Return the median milliseconds by label and length."""
    curves: dict[str, dict[int, float]] = {}
    for row in rows:
        curves.setdefault(label(row), {})[row[length]] = row["median_ms"]
    return curves


def draw_curves(
    curves: Mapping[str, Mapping[int, float]], title: str, file: Path, label: str
) -> None:
    """Plot curves on two logarithmic axes, where linear growth is a straight line."""
    figure = import_module("matplotlib.figure").Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, curve) in enumerate(curves.items()):
        # The colours repeat, with another line style.
        dashes = LINE_STYLES[number // NUM_COLOURS % len(LINE_STYLES)]
        axes.plot(*zip(*curve.items(), strict=True), dashes, marker="o", markersize=4, label=name)
    axes.set(xscale="log", yscale="log", title=title)
    axes.set(xlabel="tokens in the cache", ylabel=label)
    lengths = sorted({length for curve in curves.values() for length in curve})
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    ticker = import_module("matplotlib.ticker")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.grid(alpha=0.3)
    axes.legend(**LEGEND_OPTIONS)
    figure.savefig(file, dpi=90, pil_kwargs={"optimize": True})
