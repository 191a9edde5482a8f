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


def show(title: str, rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Print `rows` as a table and, as the last line, everything as JSON."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    Console().print(table)
    print(json.dumps({"bench": title, "machine": machine(), **facts, "rows": rows}))


def _text(value: Any) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else str(value)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
