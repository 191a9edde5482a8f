"""Say what a harmful format changes, and which spec to take instead."""

from __future__ import annotations

from time import monotonic
from typing import NamedTuple

from transformers import PreTrainedModel

from kvant.models import layer_shapes, max_context
from kvant.planner import plan
from kvant.platform.figures import format_kl, format_of_raw
from kvant.probing.divergence import make_format_spec
from kvant.probing.example import find_example
from kvant.probing.recommendation import format_spec, list_promotions
from kvant.probing.screen import QuickScreen
from kvant.probing.trials import ProbeTrial
from kvant.recipes import AnySpec


class Promotion(NamedTuple):
    """A less harmful spec, and its mean divergence."""

    spec: str
    mean_kl: float


class HarmDetails(NamedTuple):
    """What a harmful format changes, and whether the time was enough for all of it."""

    text: str
    is_complete: bool


def describe_harm(
    model: PreTrainedModel, spec: AnySpec, trial: ProbeTrial, seconds: float
) -> HarmDetails:
    """Say what a harmful format changes in the trial's text, and name a spec harmless there.

    Nothing more is tried after `seconds`.
    """
    deadline, name = monotonic() + seconds, format_spec(spec)
    screen, sentences = QuickScreen.from_tokens(model, trial.ids), list[str]()
    promotion = _find_promotion(screen, spec, trial.max_kl, deadline)
    has_time = monotonic() <= deadline
    if has_time and trial.tokenizer is not None:
        example = find_example(screen, trial.tokenizer, make_format_spec(model, spec))
        sentences += [] if example is None else [f"After {example.describe(name)}"]
    if promotion is None:
        sentences.append("'auto' finds the smallest harmless format")
    else:
        sentences.append(_compare_nbytes(model, spec, name, promotion))
    sentences.append("Recall was not tested: kvant.probe(model, tokenizer, spec) does")
    return HarmDetails(". ".join(sentences), has_time)


def _find_promotion(
    screen: QuickScreen, spec: AnySpec, max_kl: float, deadline: float
) -> Promotion | None:
    """Return the first promotion of a spec that is harmless to the screen's text."""
    if not isinstance(spec, str):
        return None
    for candidate, _ in list_promotions(spec):
        if monotonic() > deadline:
            return None
        kl = screen.measure_divergence(make_format_spec(screen.model, candidate)).mean_kl
        if kl <= max_kl:
            return Promotion(candidate, kl)
    return None


def _compare_nbytes(model: PreTrainedModel, spec: AnySpec, name: str, promotion: Promotion) -> str:
    """Say how many of raw's bytes both specs take."""
    layers, specs = layer_shapes(model), (spec, promotion.spec)
    context = min(plan(layers, s).context for s in specs)  # a capacity may limit it
    context = min(context, max_context(model.config) or context)
    raw, harmful, harmless = (
        plan(layers, s, context=context).nbytes_kept for s in ("raw", spec, promotion.spec)
    )
    shares = [format_of_raw(nbytes / raw) for nbytes in (harmless, harmful)]
    return (
        f"Take {promotion.spec}: mean KL {format_kl(promotion.mean_kl)} here, and {shares[0]} of "
        f"raw's bytes at {context:,} tokens, where {name} takes {shares[1]}"
    )
