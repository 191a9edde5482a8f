"""Draw the pictures of docs/: benchmark results, and memory by length.

    python tools/pictures.py

The tool measures nothing. Results come from docs/benchmarks/*.json, memory from `kvant.plan`. It
needs matplotlib: pip install 'kvant[plot]'.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import kvant
from kvant.bench import attend, speed
from kvant.bench.decode import LATENCY_LABEL
from kvant.bench.report import LEGEND_OPTIONS, draw_curves, format_figure

DOCS = Path(__file__).resolve().parent.parent / "docs"
QWEN3_SHAPE = kvant.Shape(28, 8, 128, 128)  # the cache of Qwen3-0.6B and Qwen3-1.7B
FORMATS = ("raw", "affine8", "affine4", "turbo4v2", "affine8,window=4096,sinks=4")
LENGTHS = (1024, 4096, 16384, 65536, 262144)
TURN_FIELDS = {"turn 1": "turn_1_s", "turn 2": "turn_2_s", "turn 2 after\na restart": "restarted_s"}
BarSeries = Mapping[str, Mapping[str, float]]  # series name -> bar label -> length


def load_results(name: str) -> Any:
    """Return the results of a run from docs/benchmarks."""
    return json.loads((DOCS / "benchmarks" / name).read_text(encoding="utf-8"))


def draw_memory(file: Path) -> None:
    curves = {
        spec: {n: kvant.plan(QWEN3_SHAPE, spec, context=n).nbytes / 2**30 for n in LENGTHS}
        for spec in FORMATS
    }
    draw_curves(curves, "the cache of Qwen3-0.6B, one sequence", file, "GiB")


def draw_attention(file: Path) -> None:
    results = load_results("attend.json")
    title = f"attention of {results['queries']} over N rows"
    draw_curves(attend.make_attention_curves(results["rows"]), title, file, "milliseconds (median)")


def draw_latency(file: Path) -> None:
    results = load_results("model-inside.json")
    title = f"one more token: {results['model']}, {results['dtype']}"
    draw_curves(speed.make_latency_curves(results["latency"]), title, file, LATENCY_LABEL)


def draw_first_token(file: Path) -> None:
    results = load_results("prefixes.json")
    seconds = {row["way"]: row["median_ms"] / 1e3 for row in results["rows"]}
    title = f"seconds to the first token after {results['shared']:,} tokens"
    draw_bars({"seconds": seconds}, title, file)


def draw_engine_clients(file: Path) -> None:
    draw_bars(group_by_clients(load_results("serve.json")["rows"], "way"), "tokens a second", file)


def draw_server_clients(file: Path) -> None:
    draw_bars(
        group_by_clients(load_results("servers.json")["rows"], "server"), "tokens a second", file
    )


def draw_server_turns(file: Path) -> None:
    results = load_results("servers.json")
    seconds = {
        row["server"]: {name: row[key] for name, key in TURN_FIELDS.items()}
        for row in results["turns"]
    }
    title = f"seconds to the first token after {results['turn']:,} words"
    draw_bars(seconds, title, file)


def group_by_clients(rows: Iterable[Mapping[str, Any]], series_key: str) -> BarSeries:
    series: dict[str, dict[str, float]] = {}
    for row in rows:
        clients = f"{row['clients']} client{'s' * (row['clients'] > 1)}"
        series.setdefault(row[series_key], {})[clients] = row["tokens_s"]
    return series


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


PICTURES: Mapping[str, Callable[[Path], None]] = {
    "memory.png": draw_memory,
    "benchmarks/attend.png": draw_attention,
    "benchmarks/model-inside.png": draw_latency,
    "benchmarks/prefixes.png": draw_first_token,
    "benchmarks/serve.png": draw_engine_clients,
    "benchmarks/servers.png": draw_server_clients,
    "benchmarks/turns.png": draw_server_turns,
}


def main() -> None:
    for name, picture in PICTURES.items():
        picture(DOCS / name)


if __name__ == "__main__":
    main()
