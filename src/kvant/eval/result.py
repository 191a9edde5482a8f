"""The results of an evaluation: figures of one format, the result file and the plot.

The result file has one JSON line per format, so an interrupted run continues where it stopped. The
first line holds the model, the text and the settings; a run with others needs another file. An
incomplete last line is dropped. A format is identified by its name and its recipes.

The plot shows divergence against bytes, and the Pareto front: formats that no other format beats in
both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvant.errors import CapacityError, name_path
from kvant.models import max_context
from kvant.planner import plan
from kvant.probing.divergence import Divergence
from kvant.probing.recall import RecallShares
from kvant.recipes import AnySpec


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of an evaluation; the defaults take two minutes for four formats on a few cores."""

    tokens: int = 16384  # of the text; every next token is predicted
    context: int = 2048  # tokens per piece, at most the model's context
    prompts: int = 8  # pieces to continue, and pieces to plant items in
    continued: int = 64  # tokens to continue a prompt by
    seed: int = 0  # of planted items and bootstrap intervals

    def __post_init__(self) -> None:
        for name, minimum in (("tokens", 2), ("context", 2), ("prompts", 1), ("continued", 2)):
            value = getattr(self, name)
            if value < minimum:
                raise ValueError(f"{name}={value}: {minimum} or more is needed")

    def limit_context(self, model: Any) -> EvaluationSettings:
        """Return the settings with at most the model's context."""
        return replace(self, context=min(self.context, max_context(model) or self.context))


BOOTSTRAP_BLOCK_POSITIONS = 128  # neighbours are correlated, so whole blocks are drawn
NUM_BOOTSTRAP_DRAWS = 1000
ConfidenceInterval = tuple[float, float]


def bootstrap_mean_interval(
    values: Tensor, *, block: int = BOOTSTRAP_BLOCK_POSITIONS, level: float = 0.95, seed: int = 0
) -> ConfidenceInterval:
    """Return a confidence interval of the mean, by a block bootstrap."""
    block = max(1, min(block, len(values) // 8))  # at least 8 blocks of a short text
    blocks = values.double().split(block)  # type: ignore[no-untyped-call]
    sums = torch.stack([part.sum() for part in blocks])
    counts = torch.tensor([len(part) for part in blocks])
    samples = torch.randint(
        len(blocks),
        (NUM_BOOTSTRAP_DRAWS, len(blocks)),
        generator=torch.Generator().manual_seed(seed),
    )
    means = (sums[samples].sum(1) / counts[samples].sum(1)).sort().values
    num_outside = round(NUM_BOOTSTRAP_DRAWS * (1 - level) / 2)
    return float(means[num_outside]), float(means[-1 - num_outside])


REPORTED_CONTEXT_LENGTHS = {"2k": 2048, "32k": 32768}  # for the bytes of a whole cache


@dataclass(frozen=True)
class EvaluationResult:
    """The quality of a format against the raw cache of the same model, and its costs."""

    format: str
    positions: int
    raw_perplexity: float
    perplexity: float
    perplexity_change: float  # relative: 0.01 is one percent more
    perplexity_change_interval: ConfidenceInterval  # 95%
    mean_kl: float  # nats, as all KL values
    mean_kl_interval: ConfidenceInterval
    p99_kl: float
    p999_kl: float
    top1: float
    identical: float  # tokens of the greedy continuation that equal raw's, of `continued`
    continued: int
    recall: RecallShares
    raw_recall: RecallShares
    row_nbytes: float  # of a sealed token in all layers
    raw_row_nbytes: float
    nbytes: Mapping[str, int | None]  # of a whole cache; None above its capacity
    raw_nbytes: Mapping[str, int | None]
    tokens_s: float
    vs_raw: float

    @property
    def recall_shares(self) -> dict[str, float]:
        """Shares of correct answers by kind, over all depths."""
        return {kind: fmean(depths.values()) for kind, depths in self.recall.items()}

    @property
    def raw_recall_shares(self) -> dict[str, float]:
        return {kind: fmean(depths.values()) for kind, depths in self.raw_recall.items()}

    @property
    def recall_share(self) -> float:
        """Share of correct answers, the mean over the kinds."""
        return fmean(self.recall_shares.values())

    def to_json(self) -> dict[str, Any]:
        """Return the fields; infinity, of formats with NaN logits, becomes null."""
        return {name: _encode_infinity(value) for name, value in asdict(self).items()}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> EvaluationResult:
        return EvaluationResult(
            **{field.name: _decode_infinity(data[field.name]) for field in fields(EvaluationResult)}
        )


def summarize_quality(divergence: Divergence, seed: int) -> dict[str, Any]:
    """Return the quality figures over all positions."""
    interval = bootstrap_mean_interval(divergence.loss - divergence.raw_loss, seed=seed)
    change = torch.tensor(interval, dtype=torch.float64).expm1()  # may be infinite
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
    """Return the bytes of rows and caches in the dtype of the checkpoint."""
    config, lengths = model.config, REPORTED_CONTEXT_LENGTHS.items()
    return {
        "row_nbytes": sum(plan(config, spec, context=1).row_nbytes),
        "raw_row_nbytes": sum(plan(config, "raw").row_nbytes),
        "nbytes": {name: _plan_nbytes(config, spec, count) for name, count in lengths},
        "raw_nbytes": {name: _plan_nbytes(config, "raw", count) for name, count in lengths},
    }


def flatten_result(result: EvaluationResult) -> dict[str, Any]:
    """Flatten a result to one scalar per name, for a row of CSV."""
    cells: dict[str, Any] = {}
    for name, value in result.to_json().items():
        if isinstance(value, list):
            cells |= {f"{name}_low": value[0], f"{name}_high": value[1]}
        elif isinstance(value, dict):
            numbers = {"recall": result.recall_shares, "raw_recall": result.raw_recall_shares}.get(
                name, value
            )
            cells |= {f"{name}_{key}": number for key, number in numbers.items()}
        else:
            cells[name] = value
    return cells


def _plan_nbytes(config: Any, spec: AnySpec, context: int) -> int | None:
    try:
        return plan(config, spec, context=context).nbytes_kept
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
    """The file of an evaluation's results; without a path, only in memory."""

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        self.path = path
        self._results: dict[tuple[str, str], EvaluationResult] = {}
        if path is None:
            return
        first, *rest = _read_lines(path) if path.exists() else [dict(header)]
        _check_header(path, first, header)
        for row in rest:
            self._results[row["format"], row["recipe"]] = EvaluationResult.from_json(row)
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
    complete, end, incomplete = text.rpartition("\n")
    try:
        rows: list[Any] = [json.loads(line) for line in complete.splitlines()]
    except ValueError:
        rows = []
    if not rows or not all(isinstance(row, dict) for row in rows) or "eval" not in rows[0]:
        raise ValueError(f"{path} is not a file of saved results: name another, or a new one")
    if incomplete:
        path.write_text(complete + end, encoding="utf-8")
    return rows


def _check_header(path: Path, header: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, value in expected.items():
        if header.get(name) != value:
            raise ValueError(
                f"{path} holds results with {name} {header.get(name)}, and this run has {value}: "
                "give the same settings, or save to another file"
            )


MIN_PLOTTED_KL = 1e-7  # nats; below it is rounding, and the axis is logarithmic


class FormatPoint(NamedTuple):
    """A format in the plot: bytes of a sealed row relative to raw, and the mean divergence."""

    relative_nbytes: float
    kl: float
    name: str

    @classmethod
    def from_result(cls, result: EvaluationResult) -> FormatPoint:
        return cls(result.row_nbytes / result.raw_row_nbytes, result.mean_kl, result.format)


def find_pareto_front(points: Iterable[FormatPoint]) -> list[FormatPoint]:
    """Return the Pareto front: points, by bytes, each with less divergence than all before."""
    front: list[FormatPoint] = []
    for point in sorted(points):
        if not front or point.kl < front[-1].kl:
            front.append(point)
    return front


def _is_near(point: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether the labels of two points would overlap."""
    return abs(point[0] - other[0]) < 0.03 and abs(math.log10(point[1] / other[1])) < 0.1


def plot_results(points: Sequence[FormatPoint], title: str, file: Path) -> None:
    figure = import_module("matplotlib.figure").Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    front = [
        (point.relative_nbytes, max(MIN_PLOTTED_KL, point.kl))
        for point in find_pareto_front(points)
    ]
    axes.plot(*zip(*front, strict=True), color="0.7", zorder=1)
    labelled: list[tuple[float, float]] = []
    for point in points:
        position = point.relative_nbytes, max(MIN_PLOTTED_KL, point.kl)
        axes.scatter(*position, s=18, zorder=2)
        num_overlapping = sum(_is_near(position, other) for other in labelled)
        axes.annotate(
            point.name,
            position,
            textcoords="offset points",
            xytext=(4, 4 - 11 * num_overlapping),
            fontsize="small",
        )
        labelled.append(position)
    axes.margins(x=0.12)
    axes.set(yscale="log", title=title, ylabel="mean KL against raw (nats)")
    axes.set(xlabel="bytes of a sealed row, relative to raw")
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=90, pil_kwargs={"optimize": True})
