"""How a benchmark speaks: a table for people, then one JSON line for programs."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from kvant.errors import CacheError


def run(main: Callable[..., None]) -> None:
    """Run a benchmark as a command: what was typed wrong is one line and exit code 2."""
    try:
        typer.run(main)
    except (CacheError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def progress(text: str) -> None:
    """Say on a terminal what is done now, in one line; "" wipes it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def show(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
    file: Path | None = None,
) -> None:
    """Print `rows` as a table and, as the last line, everything as JSON; that also to `file`."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    Console().print(table)
    line = json.dumps({"bench": title, "machine": machine(), **facts, "rows": rows})
    print(line)
    if file is not None:
        file.write_text(line + "\n", encoding="utf-8")


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.2f}"  # ratios near 1 need the digits


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
