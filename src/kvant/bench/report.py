"""Report benchmarks: a table for people, a JSON line for programs, and a plot."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvant.bench.device import CPU, BenchDevice
from kvant.devices import describe_processor
from kvant.exit_codes import run_app
from kvant.tables import PIPE_WIDTH

NUM_COLOURS = 10  # of matplotlib's colour cycle
LINE_STYLES = ("-", "--", ":")
# To the right of the plot, where it hides nothing.
LEGEND_OPTIONS: Mapping[str, Any] = {
    "loc": "upper left",
    "bbox_to_anchor": (1, 1),
    "fontsize": "small",
}
Json = Annotated[bool, typer.Option("--json", help="Print only the JSON line")]


def run(main: Callable[..., None]) -> None:
    """Run a benchmark as a command."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    run_app(app)


def describe_machine(device: BenchDevice = CPU) -> dict[str, Any]:
    """Return the hardware and software that the figures depend on."""
    return {
        "processor": describe_processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **device.describe(),
    }


def show_progress(text: str) -> None:
    """Show one line of progress on a terminal; an empty text clears it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def check_files(**files: Path | None) -> None:
    """Raise before a measurement if the folder of an output file does not exist."""
    for name, file in files.items():
        if file is not None and not file.parent.is_dir():
            raise ValueError(f"--{name} {file}: there is no folder {file.parent}")


def parse_numbers(option: str, text: str) -> list[int]:
    """Parse whole numbers separated by commas."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"--{option} {text}: whole numbers separated by commas are needed")
    return [int(word) for word in words]


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print `rows`, which all have the keys of the first."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(format_figure(value) for value in row.values()))
    console.print(table)


def print_json(
    title: str, facts: Mapping[str, Any], device: BenchDevice = CPU, *, quiet: bool = False
) -> None:
    """Print everything as one JSON line; skip it below a table on a terminal."""
    if quiet or not sys.stdout.isatty():
        print(json.dumps({"bench": title, "machine": describe_machine(device), **facts}))


def print_report(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
    *,
    quiet: bool,
    device: BenchDevice = CPU,
) -> None:
    """Print the table, unless quiet, and the JSON line."""
    if not quiet:
        print_table(title, rows)
    print_json(title, {**facts, "rows": rows}, device, quiet=quiet)


def format_figure(value: Any) -> str:
    """Format one figure."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.2f}"  # ratios near 1 need 2 digits


def check_plot(file: Path | None) -> None:
    """Raise before a measurement if a plot is requested and matplotlib is missing."""
    if file is not None and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib, or 'kvant[plot]'")


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
