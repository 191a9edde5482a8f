"""`kvant.tune`: the formats of each layer and side that harm a model least within a limit of size.

After KVTuner (arXiv 2502.04420), in three steps:

1. The harm of a format to one side of one layer is the divergence of predictions while all else is
   raw. Each reads MAX_SCREEN_TOKENS tokens after a raw cache that was recoded. Formats far from the
   limit are left out.
2. Small errors hardly interact, so harms add up. `choose_formats` finds the smallest sum within the
   limit: the mixture.
3. The mixture and all uniform formats within the limit that `auto` tries predict the whole text.
   The least divergence wins: a mixture that is no better than a uniform format is not returned.

Recall is not tested; `kvant.probe` does that for the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, product
from typing import Any, TypeAlias

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from kvant.errors import SpecError
from kvant.hf import get_text_model, get_transformers_model
from kvant.models import layer_shapes, max_context
from kvant.models.shapes import LayerShape
from kvant.planner import plan
from kvant.platform.figures import format_kl, format_top1
from kvant.platform.sizes import as_bytes, format_size
from kvant.probing.divergence import make_unbounded_spec
from kvant.probing.trials import (
    FORMAT_LADDER,
    ProbeTrial,
    SpecEvaluator,
    make_trial,
)
from kvant.probing.verdicts import ProbeProgress, ignore_progress
from kvant.recipes import LayerSpec, iterate_attention
from kvant.spec import describe_spec, parse
from kvant.spec.formats import format_layers

MIXTURE_FORMATS = ("turbo2", "turbo3", "turbo4", "affine6", "affine8", "raw")
SIZE_FACTOR = 2  # uniform formats more than this factor below or above the limit are left out
MAX_STEPS = 4096  # into which the limit is divided at most
COUNTED_ROWS = 64  # the bytes of one row may be a fraction
MAX_HARM = 1e6  # nats; NaN logits have an infinite divergence
DEFAULT_CONTEXT = 8192  # tokens, of a model without a limit

LayerSizes: TypeAlias = tuple[int, ...]  # bytes of each layer that attends
FormatPair: TypeAlias = tuple[str, str]  # of the keys and of the values


@dataclass(frozen=True)
class BitsLimit:
    """A limit on the mean bits of a value in sealed rows: codes and scales, no dense rows."""

    max_bits: float

    def measure(self, layers: Sequence[LayerShape], spec: str) -> LayerSizes:
        """Return the bytes of COUNTED_ROWS sealed rows of each layer that attends."""
        row_nbytes = plan(layers, spec, context=0).row_nbytes
        pairs = zip(row_nbytes, layers, strict=True)
        return tuple(int(COUNTED_ROWS * nbytes) for nbytes, layer in pairs if layer.attends)

    def compute_total(self, layers: Sequence[LayerShape]) -> int:
        """Return the limit on the sum of these bytes."""
        raw_bits = plan(layers, "raw").bits_per_value  # 0 if no layer attends
        share = self.max_bits / raw_bits if raw_bits else 0.0
        return math.floor(round(share * sum(self.measure(layers, "raw")), 6))

    def format_size(self, layers: Sequence[LayerShape], spec: str) -> str:
        """Format the size of a spec, rounded up."""
        return f"{math.ceil(1000 * plan(layers, spec).bits_per_value) / 1000:g} bits"

    def __str__(self) -> str:
        return f"{self.max_bits:g} bits"


@dataclass(frozen=True)
class BytesLimit:
    """A limit on the bytes of a cache of `context` tokens, dense rows and states included."""

    max_nbytes: int
    context: int

    def measure(self, layers: Sequence[LayerShape], spec: str) -> LayerSizes:
        """Return the bytes of each layer that attends."""
        pairs = zip(plan(layers, spec, context=self.context).layer_nbytes, layers, strict=True)
        return tuple(nbytes for nbytes, layer in pairs if layer.attends)

    def compute_total(self, layers: Sequence[LayerShape]) -> int:
        """Return the limit on the sum of these bytes."""
        others = plan(layers, "raw", context=self.context).nbytes
        return self.max_nbytes - (others - sum(self.measure(layers, "raw")))

    def format_size(self, layers: Sequence[LayerShape], spec: str) -> str:
        """Format the size of a spec."""
        return f"{plan(layers, spec, context=self.context).nbytes} bytes"

    def __str__(self) -> str:
        return f"{format_size(self.max_nbytes)} at {self.context} tokens"


SizeLimit: TypeAlias = BitsLimit | BytesLimit


@dataclass(frozen=True)
class MeasuredSpec:
    """A spec, and what it changes on the whole text."""

    spec: str
    mean_kl: float  # nats
    top1: float  # share of positions whose most likely token stays
    is_mixture: bool  # whether layers or sides have formats of their own


@dataclass(frozen=True)
class TunedSpec:
    """The best spec within a limit, and what was measured on the whole text.

    >>> result = kvant.tune(model, tokenizer, max_bits=32)
    >>> result.spec, result.bits_per_value, result.why
    ('raw', 32.0, 'it is exact, and fits')
    """

    spec: str
    bits_per_value: float  # of sealed rows
    trials: tuple[MeasuredSpec, ...]  # uniform formats within the limit, and the mixture if any
    why: str

    @property
    def mean_kl(self) -> float:
        """Mean divergence of the spec, nats."""
        return next(trial.mean_kl for trial in self.trials if trial.spec == self.spec)

    def __str__(self) -> str:
        lines = [f"{self.spec}: {self.bits_per_value:.4g} bits a value ({self.why})"]
        lines += [
            f"{'by layer' if trial.is_mixture else 'uniform'}: {trial.spec}: top-1 "
            f"{format_top1(trial.top1)}, mean KL {format_kl(trial.mean_kl)}"
            for trial in self.trials
        ]
        return "\n".join(lines)


def tune(
    model: nn.Module,
    tokenizer: Any,
    *,
    max_bits: float | None = None,
    max_bytes: int | str | None = None,
    context: int | None = None,
    text: str | None = None,
) -> TunedSpec:
    """Search the formats of each layer, of keys and of values, that harm predictions least.

    The limit is `max_bits` a value in sealed rows, scales included, or `max_bytes` of a cache of
    `context` tokens (default: the model's longest), dense rows included. The divergence is measured
    on `text`, or on the standard library's sources. The result is a uniform format if no mixture
    is better.

    >>> text = "def double(number): return 2 * number; " * 100
    >>> result = kvant.tune(model, tokenizer, max_bits=3.25, text=text)
    >>> result.bits_per_value <= 3.25
    True
    """
    if (max_bits is None) == (max_bytes is None):
        raise ValueError(f"max_bits={max_bits} and max_bytes={max_bytes}: one of the two is needed")
    if max_bits is not None and not 0 < max_bits < math.inf:
        raise ValueError(f"max_bits={max_bits}: a number above 0 is needed, such as 3.25")
    if context is not None and (max_bytes is None or context < 1):
        raise ValueError(f"context={context}: 1 or more is needed, together with max_bytes=")
    model = get_text_model(get_transformers_model(model))
    limit: SizeLimit
    if max_bits is not None:
        limit = BitsLimit(max_bits)
    else:
        assert max_bytes is not None
        default = max_context(model.config) or DEFAULT_CONTEXT
        limit = BytesLimit(as_bytes(max_bytes), default if context is None else context)
    return find_best_spec(model, make_trial(model, tokenizer, text), limit)


def find_best_spec(
    model: PreTrainedModel,
    trial: ProbeTrial,
    limit: SizeLimit,
    progress: ProbeProgress = ignore_progress,
) -> TunedSpec:
    """Return the spec of least divergence on a trial's text within a limit."""
    layers, evaluator = layer_shapes(model), SpecEvaluator(model, trial)
    totals = measure_totals(layers, limit)
    if totals["raw"] <= limit.compute_total(layers):
        exact = MeasuredSpec("raw", 0.0, 1.0, is_mixture=False)
        return TunedSpec(
            "raw", plan(layers, "raw").bits_per_value, (exact,), "it is exact, and fits"
        )
    uniform, words = list_candidates(layers, limit, totals)
    recipes = [*iterate_attention(*make_unbounded_spec(model, "raw").layers)]
    num_harms = sum(len(recipe.sides) for recipe in recipes) * len({*words} - {"raw"})
    num_measured, done = 2 + num_harms + len(uniform) + 1, count()

    def measure_kl(spec: str) -> float:
        progress(next(done), num_measured)
        return evaluator.screen.measure_divergence(make_unbounded_spec(model, spec)).mean_kl

    def try_spec(spec: str, *, is_mixture: bool) -> MeasuredSpec:
        progress(next(done), num_measured)
        divergence = evaluator.measure_divergence(spec)
        return MeasuredSpec(spec, divergence.mean_kl, divergence.top1, is_mixture)

    option = min(("", ",smooth"), key=lambda option: measure_kl(uniform[-1] + option))
    harms = measure_harms(recipes, words, lambda spec: measure_kl(spec + option))
    sizes = {pair: limit.measure(layers, "/".join(pair)) for pair in harms[0]}
    mixture = choose_formats(harms, sizes, limit.compute_total(layers))
    spec = describe_spec(parse(format_layers(mixture), len(recipes))) + option
    trials = [try_spec(word + option, is_mixture=False) for word in uniform]
    best = min(trials, key=lambda trial: trial.mean_kl)
    if spec not in [trial.spec for trial in trials]:
        trials.append(try_spec(spec, is_mixture=True))
    why = "no mixture is better than this uniform format"
    if trials[-1].mean_kl < best.mean_kl:
        why = f"{best.spec} is the best uniform format"
        best = trials[-1]
    return TunedSpec(best.spec, plan(layers, best.spec).bits_per_value, tuple(trials), why)


def measure_totals(layers: Sequence[LayerShape], limit: SizeLimit) -> dict[str, int]:
    """Return the sizes of the formats that these layers support, the smallest first."""
    totals = {"raw": sum(limit.measure(layers, "raw"))}  # raises if the limit is invalid
    for word in (*FORMAT_LADDER, *MIXTURE_FORMATS):
        with suppress(ValueError):  # the codec does not support the width of the rows
            totals[word] = sum(limit.measure(layers, word))
    return dict(sorted(totals.items(), key=lambda pair: pair[1]))


def list_candidates(
    layers: Sequence[LayerShape], limit: SizeLimit, totals: Mapping[str, int]
) -> tuple[list[str], list[str]]:
    """Return the uniform formats and the formats of sides to try, the smallest first.

    A format is tried if its size is within SIZE_FACTOR of the limit.
    """
    total = limit.compute_total(layers)
    fitting = [word for word in totals if totals[word] <= total]
    if not fitting:
        smallest = next(iter(totals))
        raise SpecError(
            f"a limit of {limit}: the smallest format for this model, {smallest}, takes"
            f" {limit.format_size(layers, smallest)}; allowed: that, or more"
        )
    # The largest that fits is always tried, however large the limit is.
    lower = min(total / SIZE_FACTOR, max(totals[word] for word in fitting))
    uniform = [word for word in fitting if word in FORMAT_LADDER and totals[word] >= lower]
    near = (word for word in totals if lower <= totals[word] <= SIZE_FACTOR * total)
    return uniform, [word for word in near if word in MIXTURE_FORMATS]


def measure_harms(
    recipes: Sequence[LayerSpec], words: Sequence[str], measure_kl: Callable[[str], float]
) -> list[dict[FormatPair, float]]:
    """Return the harm of each pair of formats to each layer, as the sum of its sides' harms."""
    harms: list[dict[FormatPair, float]] = []
    lossy = [word for word in words if word != "raw"]
    for layer, recipe in enumerate(recipes):
        keys = {word: measure_kl(f"raw,layers={layer}:{word}/raw") for word in lossy}
        keys["raw"] = 0.0
        if "values" not in recipe.sides:  # they are inside the keys
            harms.append({(word, word): keys[word] for word in words})
            continue
        values = {word: measure_kl(f"raw,layers={layer}:raw/{word}") for word in lossy}
        values["raw"] = 0.0
        harms.append({pair: keys[pair[0]] + values[pair[1]] for pair in product(words, words)})
    return harms


def choose_formats(
    harms: Sequence[Mapping[FormatPair, float]], sizes: Mapping[FormatPair, LayerSizes], limit: int
) -> list[str]:
    """Return the format of each layer: the least sum of harms whose sizes add up to the limit.

    A knapsack by dynamic programming over the bytes beyond the smallest formats, in equal steps.
    Bytes are rounded up to steps, so the limit holds.
    """
    pairs = [*harms[0]]
    nbytes = np.array([sizes[pair] for pair in pairs]).T  # [layers, pairs]
    extra = nbytes - nbytes.min(1, keepdims=True)
    spare = min(limit - int(nbytes.min(1).sum()), int(extra.max(1).sum()))
    step = max(int(np.gcd.reduce(extra, axis=None)), -(-spare // MAX_STEPS), 1)
    costs, num_steps = -(-extra // step), spare // step
    least, choices = np.zeros(num_steps + 1), []  # by steps available: harm, and its pairs
    for layer_harms, layer_costs in zip(harms, costs, strict=True):
        totals = np.full((len(pairs), num_steps + 1), np.inf)
        for index, (pair, cost) in enumerate(zip(pairs, layer_costs, strict=True)):
            harm = min(layer_harms[pair], MAX_HARM)
            totals[index, cost:] = least[: max(0, num_steps + 1 - cost)] + harm
        choices.append(totals.argmin(0))
        least = totals.min(0)
    words: list[str] = []
    for choice, layer_costs in zip(reversed(choices), reversed(costs), strict=True):
        index = choice[num_steps]
        num_steps -= layer_costs[index]
        words.append("/".join(pairs[index]))
    return words[::-1]
