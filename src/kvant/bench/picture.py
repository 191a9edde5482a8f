"""What every candidate takes against the length, as a picture; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path


def check_plot(file: Path | None) -> None:
    """Said before anything is measured."""
    if file is not None and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install kvant[plot]")


def draw(curves: Mapping[str, Mapping[int, float]], title: str, file: Path, label: str) -> None:
    """Both axes in powers: a candidate that doubles with the length is a straight line upward."""
    figure = import_module("matplotlib.figure").Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, curve in curves.items():
        axes.plot(list(curve), list(curve.values()), marker="o", markersize=4, label=name)
    axes.set(xscale="log", yscale="log", title=title)
    axes.set(xlabel="tokens there", ylabel=label)
    lengths = sorted({length for curve in curves.values() for length in curve})
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    ticker = import_module("matplotlib.ticker")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=90, pil_kwargs={"optimize": True})
