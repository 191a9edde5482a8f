"""How a benchmark speaks: a table for people, then one JSON line for programs, and a picture."""

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

NUM_COLOURS = 10  # that matplotlib draws curves in, before it begins again
LINE_STYLES = ("-", "--", ":")
# Where a legend hides nothing of a picture.
LEGEND_OPTIONS: Mapping[str, Any] = {
    "loc": "upper left",
    "bbox_to_anchor": (1, 1),
    "fontsize": "small",
}
Json = Annotated[bool, typer.Option("--json", help="Print the JSON line and nothing else.")]


def run(main: Callable[..., None]) -> None:
    """Run a benchmark as a command of its own."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    run_app(app)


def describe_machine(device: BenchDevice = CPU) -> dict[str, Any]:
    """What the figures were taken on."""
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
    """Say on a terminal what is done now, in one line; "" wipes it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def check_files(**files: Path | None) -> None:
    """What is written at the end has a place to be written to: that is known before."""
    for name, file in files.items():
        if file is not None and not file.parent.is_dir():
            raise ValueError(f"--{name} {file}: there is no folder {file.parent}")


def parse_numbers(option: str, text: str) -> list[int]:
    """What a user typed with commas between."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"--{option} {text}: whole numbers with commas between are needed")
    return [int(word) for word in words]


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print `rows`, which all have the names of the first."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    made = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for name in rows[0]:
        made.add_column(name, justify="right")
    for row in rows:
        made.add_row(*(format_figure(value) for value in row.values()))
    console.print(made)


def print_json(
    title: str, facts: Mapping[str, Any], device: BenchDevice = CPU, *, quiet: bool = False
) -> None:
    """Print everything as one JSON line; not below a table on a terminal, where nobody reads it."""
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
    """A benchmark of one table, which is left out for programs."""
    if not quiet:
        print_table(title, rows)
    print_json(title, {**facts, "rows": rows}, device, quiet=quiet)


def format_figure(value: Any) -> str:
    """One figure."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.2f}"  # ratios near 1 need the digits


def check_plot(file: Path | None) -> None:
    """Said before anything is measured."""
    if file is not None and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib, or 'kvant[plot]'")


def draw_curves(
    curves: Mapping[str, Mapping[int, float]], title: str, file: Path, label: str
) -> None:
    """Both axes in powers: a candidate that doubles with the length is a straight line upward."""
    figure = import_module("matplotlib.figure").Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, curve) in enumerate(curves.items()):
        dashes = LINE_STYLES[
            number // NUM_COLOURS % len(LINE_STYLES)
        ]  # the same colour again, but another line
        axes.plot(*zip(*curve.items(), strict=True), dashes, marker="o", markersize=4, label=name)
    axes.set(xscale="log", yscale="log", title=title)
    axes.set(xlabel="tokens there", ylabel=label)
    lengths = sorted({length for curve in curves.values() for length in curve})
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    ticker = import_module("matplotlib.ticker")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.grid(alpha=0.3)
    axes.legend(**LEGEND_OPTIONS)
    figure.savefig(file, dpi=90, pil_kwargs={"optimize": True})
