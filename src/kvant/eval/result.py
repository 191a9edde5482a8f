"""What is measured of one format, and how it is kept and drawn.

Kept are plain numbers, a line of JSON each. A run that was ended goes on where its file ends. The
first line says what is measured: another model, text or settings is another file. A line that was
not finished is dropped. A format is known by its name and its recipes.

Drawn is divergence against bytes: what no other format beats in both is the front.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvant.errors import CapacityError, name_path
from kvant.planner import plan
from kvant.probing.divergence import Divergence
from kvant.probing.recall import RecallShares
from kvant.recipes import AnySpec


@dataclass(frozen=True)
class EvaluationSettings:
    """The defaults are for a small model on a few cores: two minutes for four formats."""

    tokens: int = 16384  # of text, whose every next token is predicted
    context: int = 2048  # tokens of a piece of it, or what the model has positions for
    prompts: int = 8  # pieces that are continued, and pieces that something is planted in
    continued: int = 64  # tokens that a prompt is continued by
    seed: int = 0  # of what is planted, and of the intervals

    def __post_init__(self) -> None:
        for name, least in (("tokens", 2), ("context", 2), ("prompts", 1), ("continued", 2)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name}={value}: {least} or more is needed")


BOOTSTRAP_BLOCK_POSITIONS = 128  # positions
NUM_BOOTSTRAP_DRAWS = 1000
ConfidenceInterval = tuple[float, float]


def bootstrap_mean_interval(
    values: Tensor, *, block: int = BOOTSTRAP_BLOCK_POSITIONS, level: float = 0.95, seed: int = 0
) -> ConfidenceInterval:
    """What the mean of such values lies between, with this confidence."""
    block = max(1, min(block, len(values) // 8))  # of a short text there are still some to draw
    parts = values.double().split(block)  # type: ignore[no-untyped-call]
    sums = torch.stack([part.sum() for part in parts])
    counts = torch.tensor([len(part) for part in parts])
    drawn = torch.randint(
        len(parts), (NUM_BOOTSTRAP_DRAWS, len(parts)), generator=torch.Generator().manual_seed(seed)
    )
    means = (sums[drawn].sum(1) / counts[drawn].sum(1)).sort().values
    outside = round(NUM_BOOTSTRAP_DRAWS * (1 - level) / 2)
    return float(means[outside]), float(means[-1 - outside])


REPORTED_CONTEXT_LENGTHS = {
    "2k": 2048,
    "32k": 32768,
}  # tokens at which the bytes of a whole cache are told


@dataclass(frozen=True)
class EvaluationResult:
    """Quality against the raw cache of the same model, and what it costs."""

    format: str
    positions: int
    raw_perplexity: float
    perplexity: float
    perplexity_change: float  # 0.01 is one percent more
    perplexity_change_interval: ConfidenceInterval  # 95%
    mean_kl: float  # nats, as all KL
    mean_kl_interval: ConfidenceInterval
    p99_kl: float
    p999_kl: float
    top1: float
    identical: float  # tokens of a greedy continuation, of `continued`
    continued: int
    recall: RecallShares
    raw_recall: RecallShares
    row_nbytes: float  # of a token in all layers, once it is sealed
    raw_row_nbytes: float
    nbytes: Mapping[str, int | None]  # of a whole cache; None where its capacity is less
    raw_nbytes: Mapping[str, int | None]
    tokens_s: float
    vs_raw: float

    @property
    def recall_shares(self) -> dict[str, float]:
        """Of the answers that were right, at all depths."""
        return {kind: fmean(depths.values()) for kind, depths in self.recall.items()}

    @property
    def raw_recall_shares(self) -> dict[str, float]:
        return {kind: fmean(depths.values()) for kind, depths in self.raw_recall.items()}

    def to_json(self) -> dict[str, Any]:
        """JSON has no infinity: null is what a format gets that gives no numbers."""
        return {name: _encode_infinity(value) for name, value in asdict(self).items()}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> EvaluationResult:
        return EvaluationResult(
            **{one.name: _decode_infinity(data[one.name]) for one in fields(EvaluationResult)}
        )


def summarize_quality(divergence: Divergence, seed: int) -> dict[str, Any]:
    """The figures of all positions."""
    more = bootstrap_mean_interval(divergence.loss - divergence.raw_loss, seed=seed)
    change = torch.tensor(more, dtype=torch.float64).expm1()  # which may be infinite
    return {
        "positions": divergence.num_positions,
        "raw_perplexity": divergence.raw_perplexity,
        "perplexity": divergence.perplexity,
        "perplexity_change": divergence.perplexity_change,
        "perplexity_change_interval": (float(change[0]), float(change[1])),
        "mean_kl": divergence.mean_kl,
        "mean_kl_interval": bootstrap_mean_interval(divergence.kl, seed=seed),
        "p99_kl": divergence.quantile(0.99),
        "p999_kl": divergence.quantile(0.999),
        "top1": divergence.top1,
    }


def summarize_nbytes(model: Any, spec: AnySpec) -> dict[str, Any]:
    """What the rows of a checkpoint take, whatever it computes in here."""
    shape = model.config
    return {
        "row_nbytes": plan(shape, spec, context=1).nbytes_per_token,
        "raw_row_nbytes": plan(shape, "raw").nbytes_per_token,
        "nbytes": {
            name: _plan_nbytes(shape, spec, count)
            for name, count in REPORTED_CONTEXT_LENGTHS.items()
        },
        "raw_nbytes": {
            name: _plan_nbytes(shape, "raw", count)
            for name, count in REPORTED_CONTEXT_LENGTHS.items()
        },
    }


def flatten_result(result: EvaluationResult) -> dict[str, Any]:
    """One scalar a name, for a table of CSV."""
    found: dict[str, Any] = {}
    for name, value in result.to_json().items():
        if isinstance(value, list):
            found |= {f"{name}_low": value[0], f"{name}_high": value[1]}
        elif isinstance(value, dict):
            told = {"recall": result.recall_shares, "raw_recall": result.raw_recall_shares}.get(
                name, value
            )
            found |= {f"{name}_{key}": number for key, number in told.items()}
        else:
            found[name] = value
    return found


def _plan_nbytes(shape: Any, spec: AnySpec, context: int) -> int | None:
    try:
        return plan(shape, spec, context=context).nbytes_kept
    except CapacityError:
        return None


def _encode_infinity(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_encode_infinity(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _decode_infinity(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode_infinity(part) for part in value)
    return math.inf if value is None else value


class ResultFile:
    """The results of one measurement; without a path only in memory."""

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        self.path = path
        self._results: dict[tuple[str, str], EvaluationResult] = {}
        if path is None:
            return
        first, *rest = _read_lines(path) if path.exists() else [dict(header)]
        _check_header(path, first, header)
        for told in rest:
            self._results[told["format"], told["recipe"]] = EvaluationResult.from_json(told)
        if not path.exists():
            self._append_line(header)

    def get(self, name: str, recipe: str) -> EvaluationResult | None:
        return self._results.get((name, recipe))

    def add(self, recipe: str, result: EvaluationResult) -> None:
        self._results[result.format, recipe] = result
        self._append_line(result.to_json() | {"recipe": recipe})

    def _append_line(self, line: Mapping[str, Any]) -> None:
        if self.path is not None:
            with name_path(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def _read_lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8", errors="replace")
    whole, end, torn = text.rpartition("\n")
    try:
        found: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]
    except ValueError:
        found = []
    if not found or "eval" not in found[0]:
        raise ValueError(f"{path} is no file of saved results: name another, or a new one")
    if torn:
        path.write_text(whole + end, encoding="utf-8")
    return found


def _check_header(path: Path, header: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, value in expected.items():
        if header.get(name) != value:
            raise ValueError(
                f"{path} holds results with {name} {header.get(name)}, and this is {value}: "
                "give the same settings, or save to another file"
            )


MIN_PLOTTED_KL = 1e-7  # nats: below is rounding, and a scale in powers has no zero


class FormatPoint(NamedTuple):
    """A format: bytes of a sealed row, of raw, and the mean divergence."""

    relative_nbytes: float
    kl: float
    name: str

    @classmethod
    def from_result(cls, result: EvaluationResult) -> FormatPoint:
        return cls(result.row_nbytes / result.raw_row_nbytes, result.mean_kl, result.format)


def find_pareto_front(points: Iterable[FormatPoint]) -> list[FormatPoint]:
    """From few bytes to many, each with less divergence than all that are smaller."""
    found: list[FormatPoint] = []
    for one in sorted(points):
        if not found or one.kl < found[-1].kl:
            found.append(one)
    return found


def _is_near(point: tuple[float, float], other: tuple[float, float]) -> bool:
    """Would one name lie over the other?"""
    return abs(point[0] - other[0]) < 0.03 and abs(math.log10(point[1] / other[1])) < 0.1


def plot_results(points: Sequence[FormatPoint], title: str, file: Path) -> None:
    figure = import_module("matplotlib.figure").Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    places = [
        (one.relative_nbytes, max(MIN_PLOTTED_KL, one.kl)) for one in find_pareto_front(points)
    ]
    axes.plot(*zip(*places, strict=True), color="0.7", zorder=1)
    named: list[tuple[float, float]] = []
    for one in points:
        place = one.relative_nbytes, max(MIN_PLOTTED_KL, one.kl)
        axes.scatter(*place, s=18, zorder=2)
        near = sum(_is_near(place, other) for other in named)  # whose names stand there already
        axes.annotate(
            one.name, place, textcoords="offset points", xytext=(4, 4 - 11 * near), fontsize="small"
        )
        named.append(place)
    axes.margins(x=0.12)
    axes.set(yscale="log", title=title, ylabel="mean KL against raw (nats)")
    axes.set(xlabel="bytes of a sealed row, of raw")
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=90, pil_kwargs={"optimize": True})
