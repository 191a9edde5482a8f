"""Draw the pictures of docs/: benchmark results, memory by length, and commands on a terminal.

    python tools/pictures.py

The tool measures nothing. Results come from docs/benchmarks/*.json, memory from `kvant.plan`. It
needs matplotlib: pip install 'kvant[plot]'.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

import kvant
from kvant.bench import attend
from kvant.bench.harness import LEGEND_OPTIONS, draw_curves, format_figure
from pages import DOCS

SMOLLM2_SHAPE = kvant.Shape(30, 3, 64, 64)  # of the cache of SmolLM2-135M
FORMATS = ("raw", "affine8", "affine4", "affine8,window=2048")
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
TURN_FIELDS = {"turn 1": "turn_1_s", "turn 2": "turn_2_s", "turn 2 after\na restart": "restarted_s"}
TERMINAL_WIDTH = 92
FONT = re.compile(r"@font-face \{.*?\}", re.DOTALL)  # the picture must not load remote files
COMMANDS = (
    'kvant run --kv-cache affine4 --prompt "class Pipe:" --repetition-penalty 1.15 '
    "--temperature 0.5 --seed 1 --max-new-tokens 60",
    "kvant formats affine4,window=4096",
    "kvant plan --context 2048 --budget 64MiB",
)
BarSeries = Mapping[str, Mapping[str, float]]  # series name -> bar label -> length


def load_results(name: str) -> Any:
    """Return the results of a run from docs/benchmarks."""
    return json.loads((DOCS / "benchmarks" / name).read_text(encoding="utf-8"))


def draw_memory(file: Path) -> None:
    curves = {
        spec: {n: kvant.plan(SMOLLM2_SHAPE, spec, context=n).nbytes / 2**20 for n in LENGTHS}
        for spec in FORMATS
    }
    draw_curves(curves, "the cache of SmolLM2-135M, one sequence", file, "MiB")


def draw_attention(file: Path) -> None:
    results = load_results("attend.json")
    title = f"attention of {results['queries']} over N rows"
    draw_curves(attend.make_attention_curves(results["rows"]), title, file, "milliseconds (median)")


def draw_first_token(file: Path) -> None:
    results = load_results("prefixes.json")
    seconds = {row["way"]: row["median_ms"] / 1e3 for row in results["rows"]}
    title = f"seconds to the first token after {results['shared']:,} tokens"
    draw_bars({"seconds": seconds}, title, file)


def draw_clients(name: str, series_key: str, file: Path) -> None:
    series: dict[str, dict[str, float]] = {}
    for row in load_results(name)["rows"]:
        clients = f"{row['clients']} client{'s' * (row['clients'] > 1)}"
        series.setdefault(row[series_key], {})[clients] = row["tokens_s"]
    draw_bars(series, "tokens a second", file)


def draw_server_turns(file: Path) -> None:
    results = load_results("servers.json")
    seconds = {
        row["server"]: {name: row[key] for name, key in TURN_FIELDS.items()}
        for row in results["turns"]
    }
    draw_bars(seconds, f"seconds to the first token after {results['turn']:,} words", file)


def draw_bars(series: BarSeries, title: str, file: Path) -> None:
    """Draw horizontal bars from 0, each with its value."""
    labels = list(next(iter(series.values())))
    height = 0.8 / len(series)
    size = (7, 1 + 0.15 * len(labels) * (1 + len(series)))
    figure = import_module("matplotlib.figure").Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    for number, (name, bars) in enumerate(series.items()):
        places = [place + number * height for place in range(len(labels))]
        drawn = axes.barh(places, [bars[label] for label in labels], height, label=name)
        axes.bar_label(drawn, fmt=format_figure, padding=3, fontsize="small")
    middle = (len(series) - 1) * height / 2
    axes.set_yticks([place + middle for place in range(len(labels))], labels)
    axes.invert_yaxis()  # the first label at the top
    axes.margins(x=0.1)
    axes.set(title=title)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    if len(series) > 1:
        axes.legend(**LEGEND_OPTIONS)
    figure.savefig(file, dpi=90, pil_kwargs={"optimize": True})


def draw_terminal(file: Path) -> None:
    """Draw the output of commands on a terminal, with its colours."""
    console = Console(record=True, width=TERMINAL_WIDTH, file=StringIO(), force_terminal=True)
    environment = os.environ | {"COLUMNS": str(TERMINAL_WIDTH), "TERM": "xterm-256color"}
    for command in COMMANDS:
        program, *words = shlex.split(command)
        path = str(Path(sys.executable).with_name(program))
        merged: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        output = subprocess.run([path, *words], env=environment, **merged).stdout
        console.print(Text(f"$ {command}", style="bold"))
        console.print(Text.from_ansi(output))
    file.write_text(FONT.sub("", console.export_svg(title="kvant")), encoding="utf-8")


PICTURES: Mapping[str, Callable[[Path], None]] = {
    "memory.png": draw_memory,
    "benchmarks/attend.png": draw_attention,
    "benchmarks/prefixes.png": draw_first_token,
    "benchmarks/serve.png": partial(draw_clients, "serve.json", "way"),
    "benchmarks/servers.png": partial(draw_clients, "servers.json", "server"),
    "benchmarks/turns.png": draw_server_turns,
    "terminal.svg": draw_terminal,
}


def main() -> None:
    for name, draw in PICTURES.items():
        draw(DOCS / name)


if __name__ == "__main__":
    main()
