"""Say what a harmful format changes, and which spec to take instead."""

from __future__ import annotations

from time import monotonic
from typing import NamedTuple

from transformers import PreTrainedModel

from kvant.models import layer_shapes, max_context
from kvant.planner import plan
from kvant.probing.divergence import make_unbounded_spec
from kvant.probing.example import find_example
from kvant.probing.recommendation import format_spec, list_promotions
from kvant.probing.screen import QuickScreen
from kvant.probing.trials import ProbeTrial
from kvant.recipes import AnySpec, CacheSpec

MAX_COMPARED_CONTEXT = 8192  # tokens of the caches whose bytes are compared


class Promotion(NamedTuple):
    """A less harmful spec, and its mean divergence."""

    spec: str
    mean_kl: float


def describe_harm(
    model: PreTrainedModel, spec: AnySpec, formats: CacheSpec, trial: ProbeTrial, seconds: float
) -> str:
    """Say what a harmful format changes in the trial's text, and name a spec harmless there.

    Other specs are tried only as long as they take `seconds` in all.
    """
    deadline, name = monotonic() + seconds, format_spec(spec)
    screen, sentences = QuickScreen.from_tokens(model, trial.ids), list[str]()
    if trial.tokenizer is not None:
        example = find_example(screen, trial.tokenizer, formats)
        sentences += [] if example is None else [f"After {example.describe(name)}"]
    promotion = _find_promotion(screen, spec, trial.max_kl, deadline)
    if promotion is None:
        sentences.append("Take 'auto': the smallest harmless format")
    else:
        sentences.append(_compare_nbytes(model, spec, name, promotion))
    sentences.append("Recall was not tested: kvant.probe(model, tokenizer, spec) does")
    return ". ".join(sentences)


def _find_promotion(
    screen: QuickScreen, spec: AnySpec, max_kl: float, deadline: float
) -> Promotion | None:
    """Return the first promotion of a spec that is harmless to the screen's text."""
    if not isinstance(spec, str):
        return None
    for candidate, _ in list_promotions(spec):
        if monotonic() > deadline:
            return None
        kl = screen.measure_divergence(make_unbounded_spec(screen.model, candidate)).mean_kl
        if kl <= max_kl:
            return Promotion(candidate, kl)
    return None


def _compare_nbytes(model: PreTrainedModel, spec: AnySpec, name: str, promotion: Promotion) -> str:
    """Say how many of raw's bytes both specs take."""
    context = min(max_context(model.config) or MAX_COMPARED_CONTEXT, MAX_COMPARED_CONTEXT)
    layers = layer_shapes(model)
    raw, harmful, harmless = (
        plan(layers, s, context=context).nbytes_kept for s in ("raw", spec, promotion.spec)
    )
    return (
        f"Take {promotion.spec}: a KL of {promotion.mean_kl:.2g} here, and {harmless / raw:.2f} of "
        f"raw's bytes at {context:,} tokens, where {name} takes {harmful / raw:.2f}"
    )
