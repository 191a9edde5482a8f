"""What was measured of one format: plain numbers, as a line of JSON holds them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Any

import torch

from kvant.errors import CapacityError
from kvant.eval.bootstrap import Interval, mean_interval
from kvant.planner import plan
from kvant.probing.predictions import Damage
from kvant.probing.recall import Shares
from kvant.recipes import AnySpec

LENGTHS = {"2k": 2048, "32k": 32768}  # tokens at which the bytes of a whole cache are told


@dataclass(frozen=True)
class Result:
    """Quality against the raw cache of the same model, and what it costs."""

    format: str
    positions: int
    raw_perplexity: float
    perplexity: float
    perplexity_change: float  # 0.01 is one percent more
    perplexity_change_interval: Interval  # 95%
    mean_kl: float  # nats, as all KL
    mean_kl_interval: Interval
    p99_kl: float
    p999_kl: float
    top1: float
    identical: float  # tokens of a greedy continuation, of `continued`
    continued: int
    recall: Shares
    raw_recall: Shares
    row_nbytes: float  # of a token in all layers, once it is sealed
    raw_row_nbytes: float
    nbytes: Mapping[str, int | None]  # of a whole cache; None where its capacity is less
    raw_nbytes: Mapping[str, int | None]
    tokens_s: float
    vs_raw: float

    @property
    def shares(self) -> dict[str, float]:
        """Of the answers that were right, at all depths."""
        return {kind: fmean(depths.values()) for kind, depths in self.recall.items()}

    @property
    def raw_shares(self) -> dict[str, float]:
        return {kind: fmean(depths.values()) for kind, depths in self.raw_recall.items()}

    def as_json(self) -> dict[str, Any]:
        """JSON has no infinity: null is what a format gets that gives no numbers."""
        return {name: _finite(value) for name, value in asdict(self).items()}

    @staticmethod
    def from_json(told: Mapping[str, Any]) -> Result:
        return Result(**{one.name: _infinite(told[one.name]) for one in fields(Result)})


def quality(damage: Damage, seed: int) -> dict[str, Any]:
    """The figures of all positions."""
    more = mean_interval(damage.loss - damage.raw_loss, seed=seed)
    change = torch.tensor(more, dtype=torch.float64).expm1()  # which may be infinite
    return {
        "positions": damage.positions,
        "raw_perplexity": damage.raw_perplexity,
        "perplexity": damage.perplexity,
        "perplexity_change": damage.perplexity_change,
        "perplexity_change_interval": (float(change[0]), float(change[1])),
        "mean_kl": damage.mean_kl,
        "mean_kl_interval": mean_interval(damage.kl, seed=seed),
        "p99_kl": damage.quantile(0.99),
        "p999_kl": damage.quantile(0.999),
        "top1": damage.top1,
    }


def size(model: Any, spec: AnySpec) -> dict[str, Any]:
    """What the rows of a checkpoint take, whatever it computes in here."""
    shape = model.config
    return {
        "row_nbytes": plan(shape, spec, context=1).nbytes_per_token,
        "raw_row_nbytes": plan(shape, "raw").nbytes_per_token,
        "nbytes": {name: _nbytes(shape, spec, count) for name, count in LENGTHS.items()},
        "raw_nbytes": {name: _nbytes(shape, "raw", count) for name, count in LENGTHS.items()},
    }


def flat(result: Result) -> dict[str, Any]:
    """One scalar a name, for a table of CSV."""
    found: dict[str, Any] = {}
    for name, value in result.as_json().items():
        if isinstance(value, list):
            found |= {f"{name}_low": value[0], f"{name}_high": value[1]}
        elif isinstance(value, dict):
            told = {"recall": result.shares, "raw_recall": result.raw_shares}.get(name, value)
            found |= {f"{name}_{key}": number for key, number in told.items()}
        else:
            found[name] = value
    return found


def _nbytes(shape: Any, spec: AnySpec, context: int) -> int | None:
    try:
        return plan(shape, spec, context=context).nbytes
    except CapacityError:
        return None


def _finite(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _infinite(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_infinite(part) for part in value)
    return math.inf if value is None else value
