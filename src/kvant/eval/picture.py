"""Divergence against bytes, as a picture: what no other format beats in both is the front."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from kvant.eval.result import Result

LEAST = 1e-7  # nats: below is rounding, and a scale in powers has no zero


class Point(NamedTuple):
    """A format: bytes of a sealed row, of raw, and the mean divergence."""

    share: float
    kl: float
    name: str

    @classmethod
    def of(cls, one: Result) -> Point:
        return cls(one.row_nbytes / one.raw_row_nbytes, one.mean_kl, one.format)


def front(points: Iterable[Point]) -> list[Point]:
    """From few bytes to many, each with less divergence than all that are smaller."""
    found: list[Point] = []
    for one in sorted(points):
        if not found or one.kl < found[-1].kl:
            found.append(one)
    return found


def draw(points: Sequence[Point], title: str, file: Path) -> None:
    figure = import_module("matplotlib.figure").Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    places = [(one.share, max(LEAST, one.kl)) for one in front(points)]
    axes.plot(*zip(*places, strict=True), color="0.7", zorder=1)
    for one in points:
        place = one.share, max(LEAST, one.kl)
        axes.scatter(*place, s=18, zorder=2)
        axes.annotate(one.name, place, textcoords="offset points", xytext=(4, 4), fontsize="small")
    axes.set(yscale="log", title=title, ylabel="mean KL against raw (nats)")
    axes.set(xlabel="bytes of a sealed row, of raw")
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=90, pil_kwargs={"optimize": True})
