"""Damage against bytes, as a picture: what no other format beats in both is the front."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from kvant.eval.result import Result

LEAST = 1e-7  # nats: below is rounding, and a scale in powers has no zero


def front(results: Sequence[Result]) -> list[Result]:
    """From few bytes to many, each with less divergence than all that are smaller."""
    found: list[Result] = []
    for one in sorted(results, key=lambda one: (one.row_nbytes, one.mean_kl)):
        if not found or one.mean_kl < found[-1].mean_kl:
            found.append(one)
    return found


def draw(results: Sequence[Result], title: str, file: Path) -> None:
    figure = import_module("matplotlib.figure").Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    best = front(results)
    axes.plot([_bytes(one) for one in best], [_kl(one) for one in best], color="0.7", zorder=1)
    for one in results:
        axes.scatter(_bytes(one), _kl(one), s=18, zorder=2)
        axes.annotate(
            one.format,
            (_bytes(one), _kl(one)),
            textcoords="offset points",
            xytext=(4, 4),
            fontsize="small",
        )
    axes.set(yscale="log", title=title, ylabel="mean KL against raw (nats)")
    axes.set(xlabel="bytes of a sealed row, of raw")
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=90, pil_kwargs={"optimize": True})


def _bytes(one: Result) -> float:
    return one.row_nbytes / one.raw_row_nbytes


def _kl(one: Result) -> float:
    return max(LEAST, one.mean_kl)
