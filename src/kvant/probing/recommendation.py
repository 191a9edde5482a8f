"""`kvant.probe`: what a spec does to a model, layer by layer, and what would do less.

A text of a thousand tokens, in seconds: enough to see a format that breaks a model or its memory,
and no measurement of its quality; that is `kvant eval`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvant.errors import SpecError
from kvant.hf import get_text_model, get_transformers_model
from kvant.models import layer_shapes, max_context
from kvant.models.shapes import LayerShape
from kvant.planner import plan
from kvant.probing import verdicts
from kvant.probing.assessment import ProbeProgress, ignore_progress
from kvant.probing.divergence import Divergence, make_unbounded_spec
from kvant.probing.evaluator import FormatTrial, ProbeTrial, SpecEvaluator, make_trial
from kvant.recipes import AnySpec
from kvant.retention import DEFAULT_WINDOW_SINKS
from kvant.sizes import format_size, parse_size
from kvant.spec.auto import (
    MAX_KL,
    MAX_LOST,
    Tolerance,
    is_auto,
    parse_auto_size,
    parse_auto_tolerance,
)
from kvant.spec.formats import SMOOTHABLE_FAMILIES, parse_format

SpecPredicate = Callable[[str], bool]  # does the spec do little enough?

# From the smallest on; what is equally large stands with what needs no scales first.
FORMAT_LADDER = (
    *("turbo2", "turbo3v2", "turbo3", "turbo4v2", "turbo4v3", "turbo4", "affine4"),
    *("affine8v4", "affine6", "fp8", "affine8"),
)
CANDIDATE_SPECS = tuple(spec for word in FORMAT_LADDER for spec in (word, f"{word},smooth"))
SINKS_OPTION = f"sinks={DEFAULT_WINDOW_SINKS}"  # as many as attention is known to sink into
TAIL_ROWS = 128  # the usual one


def list_promotions(spec: str) -> Iterator[tuple[str, str]]:
    """What to take in place of a spec, and what that changes."""
    word, *options = (part.strip() for part in spec.split(","))
    form, rest = parse_format(word), [part for part in options if part != "smooth"]
    scaled = len(rest) < len(options)
    wider = f"affine8/{form.values.word}"
    if {form.keys.family, form.values.family} & SMOOTHABLE_FAMILIES:
        if not scaled:
            yield _join_spec(word, rest, "smooth"), "it has outliers: scale its channels"
        for other, why in _list_denser_options(rest):
            yield _join_spec(word, other, "smooth"), why
    if form.keys.bits < 8 and form.keys.family != "raw":
        plain = [part for part in rest if not part.startswith("group=")]
        yield _join_spec(wider, plain), "keys need affine8"
        yield _join_spec(wider, plain, "smooth"), "keys need affine8 and scaled channels"
    if not any(part.startswith("edge=") for part in rest):
        yield _join_spec(word, rest, "smooth", "edge=2"), "the layers at both ends need 8 bits"
    kept = [part for part in rest if part.split("=")[0] in ("window", "sinks", "capacity")]
    yield _join_spec("affine8", kept, "smooth"), "keys and values need 8 bits"
    yield _join_spec("raw", kept), "no format that was tried does little enough"


def _list_denser_options(options: list[str]) -> Iterator[tuple[list[str], str]]:
    """Options by which the first rows stay dense, or more of the last ones."""
    if not any(part.startswith(("sinks=", "window=", "capacity=")) for part in options):
        yield [*options, SINKS_OPTION], "its first rows need to stay dense"
    short = [part for part in options if part.startswith("tail=") and int(part[5:]) < TAIL_ROWS]
    if short:
        longer = [part for part in options if part not in short]
        yield [*longer, f"tail={TAIL_ROWS}"], "its last rows need to stay dense"


def find_smallest_spec(
    is_harmless: SpecPredicate, layers: Sequence[LayerShape], context: int, size_limit: str | None
) -> str:
    """The first of the choices that does little enough; within a size, where one is given."""
    limit = None if size_limit is None else parse_size(size_limit)
    sizes = {spec: plan(layers, spec, context=context).nbytes for spec in (*CANDIDATE_SPECS, "raw")}
    small = [spec for spec in CANDIDATE_SPECS if sizes[spec] < sizes["raw"]]
    for spec in (one for one in small if limit is None or sizes[one] <= limit):
        if is_harmless(spec):
            return spec
    if limit is None or sizes["raw"] <= limit:
        return "raw"
    least = format_size(min(sizes.values()))
    raise SpecError(
        f"auto:{size_limit}: nothing that is so small at {context} tokens leaves this model what "
        "it is; "
        f"the smallest there is takes {least}: allow more bytes, or a shorter context"
    )


def _join_spec(form: str, options: list[str], *extra_options: str) -> str:
    return ",".join([form, *options, *extra_options])


@dataclass(frozen=True)
class Probe:
    """The finding.

    >>> found = kvant.probe(model, tokenizer, "affine8")
    >>> found.harmless, found.recommended
    (True, 'affine8')
    """

    spec: AnySpec
    divergence: Divergence
    layers: tuple[float, ...]  # mean divergence where one layer alone is stored so, nats
    recalled: float  # the chance of an answer with the raw cache,
    lost: float  # and by how much it is less with the spec
    max_kl: float  # what is tolerated in the mean,
    max_lost: float  # and of what is lost
    recommended: AnySpec
    why: str

    @property
    def harmless(self) -> bool:
        return self.divergence.mean_kl <= self.max_kl and self.lost <= self.max_lost

    def __str__(self) -> str:
        worst = max(range(len(self.layers)), key=self.layers.__getitem__)
        return (
            f"{_format_spec(self.spec)}: {self.divergence.mean_kl:.2g} nats in the mean, "
            f"{self.divergence.quantile(0.999):.2g} in 1 of 1000 positions, the likeliest token "
            f"stays in {self.divergence.top1:.1%}; at most {self.max_kl:.2g} in the mean is "
            f"tolerated\n"
            f"what it read it gives back with a chance of {self.recalled - self.lost:.2f}, and of "
            f"{self.recalled:.2f} from raw; at most {self.max_lost:.2g} less is tolerated\n"
            f"layer {worst} alone: {self.layers[worst]:.2g} nats, the most of all\n"
            f"recommended: {_format_spec(self.recommended)} ({self.why})"
        )


def probe(
    model: nn.Module,
    tokenizer: Any,
    spec: AnySpec,
    *,
    text: str | None = None,
    max_kl: float = MAX_KL,
    max_lost: float = MAX_LOST,
) -> Probe:
    """What the formats of a spec do to a model, on a text of yours or one of the standard library.

    Tolerated are `max_kl` nats in the mean, and `max_lost` of the chance that the model gives back
    what was planted in the text. What a window lets go is not counted: a query sees less by it
    whatever the format.

    >>> text = "def double(number): return 2 * number; " * 100
    >>> kvant.probe(model, tokenizer, "affine8", text=text).harmless
    True
    """
    model = get_text_model(get_transformers_model(model))
    tried = make_trial(model, tokenizer, text, Tolerance(max_kl, max_lost))
    asked, judgement = resolve_auto(model, spec, tried), SpecEvaluator(model, tried)
    found, lost = judgement.measure_divergence(asked), judgement.measure_recall_loss(asked)
    recommended, why = asked, "it does little enough"
    if found.mean_kl > tried.max_kl or lost > tried.max_lost:
        recommended, why = _find_better_spec(judgement, asked)
    layers = judgement.screen.measure_by_layer(make_unbounded_spec(model, asked))
    measured = (found, layers, judgement.recall.raw_probability, lost)
    return Probe(asked, *measured, tried.max_kl, tried.max_lost, recommended, why)


@dataclass(frozen=True)
class Choice:
    """What `auto` stands for with a model, and what was tried for it, in this order."""

    spec: str
    candidates: tuple[FormatTrial, ...]

    @classmethod
    def from_json(cls, fields: Any) -> Choice:
        """Parse a choice that was kept; an error where one of its fields is wrong."""
        if fields["spec"] not in (*CANDIDATE_SPECS, "raw"):
            raise ValueError(f"{fields['spec']!r} is no format that auto tries")
        return cls(fields["spec"], tuple(map(FormatTrial.from_json, fields["candidates"])))


def resolve_auto(
    model: PreTrainedModel,
    spec: AnySpec,
    trial: ProbeTrial,
    progress: ProbeProgress = ignore_progress,
) -> AnySpec:
    """The spec, or what `auto` and `auto:SIZE` stand for with this model.

    What is tolerated is of the trial, or what the spec says: `auto,max_kl=0.01,max_lost=0.1`.
    """
    return choose(model, str(spec), trial, progress).spec if is_auto(spec) else spec


def choose(
    model: PreTrainedModel, spec: str, tried: ProbeTrial, progress: ProbeProgress = ignore_progress
) -> Choice:
    """Try formats, the smallest first, until one does little enough; or read it from disk."""
    size, tolerated = parse_auto_size(spec), parse_auto_tolerance(spec, tried.tolerance)
    tried = replace(tried, tolerance=tolerated)
    asked = "auto", size, tried.max_kl, tried.max_lost, bool(tried.make_exams())
    key = verdicts.key_of(model, tried.ids, *asked)
    if (known := verdicts.load(key, Choice.from_json)) is not None:
        return known
    judgement, candidates = SpecEvaluator(model, tried), list[FormatTrial]()

    def judge(one: str) -> bool:
        progress(len(candidates), len(CANDIDATE_SPECS))
        candidates.append(judgement.candidate(one))
        return candidates[-1].harmless

    context = max_context(model.config) or 8192
    found = Choice(find_smallest_spec(judge, layer_shapes(model), context, size), tuple(candidates))
    verdicts.store(key, asdict(found))
    return found


def _find_better_spec(evaluator: SpecEvaluator, spec: AnySpec) -> tuple[AnySpec, str]:
    if not isinstance(spec, str):
        return "raw", "recipes of your own are not changed"
    return next((one, why) for one, why in list_promotions(spec) if evaluator.is_harmless(one))


def _format_spec(spec: AnySpec) -> str:
    return spec if isinstance(spec, str) else "these recipes"
