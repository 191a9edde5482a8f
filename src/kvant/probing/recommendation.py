"""`kvant.probe`: measure the harm of a spec, layer by layer, and recommend a better one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvant.errors import SpecError
from kvant.hf import get_text_model, get_transformers_model
from kvant.models import layer_shapes, max_context
from kvant.models.shapes import LayerShape
from kvant.planner import plan
from kvant.platform.figures import describe_recall, format_kl, format_top1
from kvant.platform.sizes import format_size, parse_size
from kvant.probing import verdicts
from kvant.probing.divergence import Divergence, make_unbounded_spec
from kvant.probing.example import Example, find_example
from kvant.probing.trials import (
    CANDIDATE_SPECS,
    HARMFUL,
    HARMLESS,
    RECALLS_LESS,
    FormatTrial,
    ProbeTrial,
    SpecEvaluator,
    make_trial,
)
from kvant.probing.tuning import BitsLimit, MeasuredSpec, find_best_spec
from kvant.probing.verdicts import ProbeProgress, ignore_progress
from kvant.recipes import AnySpec
from kvant.retention import DEFAULT_WINDOW_SINKS
from kvant.spec.formats import SMOOTHABLE_FAMILIES, parse_format
from kvant.spec.language import (
    MAX_KL,
    MAX_LOST,
    Tolerance,
    is_auto,
    parse_auto_bits,
    parse_auto_size,
    parse_auto_tolerance,
    parse_words,
)

SINKS_OPTION = f"sinks={DEFAULT_WINDOW_SINKS}"  # the usual number of attention sinks
TAIL_ROWS = 128  # the tail that is usually enough
KEPT_OPTIONS = (
    "window",
    "sinks",
    "retain",
    "capacity",
    "prune",
)  # of the rows, not of their format


def list_promotions(spec: str) -> Iterator[tuple[str, str]]:
    """Yield less harmful alternatives to a spec, each with its reason."""
    word, *options = (part.strip() for part in spec.split(","))
    parsed, others = parse_format(word), [part for part in options if part != "smooth"]
    is_smooth = len(others) < len(options)
    wider = f"affine8/{parsed.values.word}"
    if {parsed.keys.family, parsed.values.family} & SMOOTHABLE_FAMILIES:
        if not is_smooth:
            yield _join_spec(word, others, "smooth"), "it has outliers: scale its channels"
        for denser, reason in _list_denser_options(others):
            yield _join_spec(word, denser, "smooth"), reason
    if parsed.keys.bits < 8 and parsed.keys.family != "raw":
        without_group = [part for part in others if not part.startswith("group=")]
        yield _join_spec(wider, without_group), "keys need affine8"
        yield _join_spec(wider, without_group, "smooth"), "keys need affine8 and scaled channels"
    if not any(part.startswith(("edge=", "layers=")) for part in others):
        edges = _join_spec(word, others, "smooth", "edge=2")
        yield edges, "the layers at both ends need 8 bits"
    limits = [part for part in others if part.split("=")[0] in KEPT_OPTIONS]
    yield _join_spec("affine8", limits, "smooth"), "keys and values need 8 bits"
    yield _join_spec("raw", limits), "every other format that was tried is harmful"


def _list_denser_options(options: list[str]) -> Iterator[tuple[list[str], str]]:
    """Yield options with dense first rows or a longer dense tail, each with its reason."""
    if not any(part.split("=")[0] in KEPT_OPTIONS for part in options):
        yield [*options, SINKS_OPTION], "its first rows need to stay dense"
    short = [part for part in options if part.startswith("tail=") and int(part[5:]) < TAIL_ROWS]
    if short:
        longer = [part for part in options if part not in short]
        yield [*longer, f"tail={TAIL_ROWS}"], "its last rows need to stay dense"


def find_smallest_spec(
    is_harmless: Callable[[str], bool],
    layers: Sequence[LayerShape],
    context: int,
    size_limit: str | None,
) -> str:
    """Return the smallest candidate that is harmless and fits the size, if one is given."""
    limit = None if size_limit is None else parse_size(size_limit)
    sizes = {spec: plan(layers, spec, context=context).nbytes for spec in (*CANDIDATE_SPECS, "raw")}
    smaller = [spec for spec in CANDIDATE_SPECS if sizes[spec] < sizes["raw"]]
    for spec in (spec for spec in smaller if limit is None or sizes[spec] <= limit):
        if is_harmless(spec):
            return spec
    if limit is None or sizes["raw"] <= limit:
        return "raw"
    smallest = format_size(min(sizes.values()))
    raise SpecError(
        f"auto:{size_limit}: no harmless format fits this size at {context} tokens; the smallest "
        f"of all takes {smallest}: allow more bytes, or a shorter context"
    )


def _join_spec(form: str, options: list[str], *extra_options: str) -> str:
    return ",".join([form, *options, *extra_options])


@dataclass(frozen=True)
class Probe:
    """What a spec does to a model, and the recommended spec.

    >>> result = kvant.probe(model, tokenizer, "affine8")
    >>> result.harmless, result.recommended
    (True, 'affine8')
    """

    spec: AnySpec
    divergence: Divergence
    layers: tuple[float, ...]  # mean divergence with this layer alone in the format, nats
    recalled: float  # probability of an answer with the raw cache,
    lost: float  # and its loss with the spec
    max_kl: float  # limit of the mean divergence,
    max_lost: float  # and of the loss
    recommended: AnySpec
    why: str
    example: Example | None = None  # what the model writes, where the spec changes that

    @property
    def harmless(self) -> bool:
        return self.divergence.mean_kl <= self.max_kl and self.lost <= self.max_lost

    @property
    def verdict(self) -> str:
        """Harmless, or what the spec does: the words of `kvant recommend`."""
        if self.harmless:
            return HARMLESS
        return HARMFUL if self.divergence.mean_kl > self.max_kl else RECALLS_LESS

    def __str__(self) -> str:
        worst = max(range(len(self.layers)), key=self.layers.__getitem__)
        name, divergence = format_spec(self.spec), self.divergence
        example = "" if self.example is None else f"after {self.example.describe(name)}\n"
        return (
            f"{name}: {self.verdict}; top-1 {format_top1(divergence.top1)}, mean KL "
            f"{format_kl(divergence.mean_kl)} (limit {format_kl(self.max_kl)}), p99.9 "
            f"{format_kl(divergence.quantile(0.999))}\n{example}"
            f"{describe_recall(self.recalled, self.lost, self.max_lost)}\n"
            f"layer {worst} alone: mean KL {format_kl(self.layers[worst])}, the most of all "
            f"layers\nrecommended: {format_spec(self.recommended)} ({self.why})"
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
    """Measure the harm of a spec to a model, on `text` or on the standard library's sources.

    The limits are `max_kl` nats of mean divergence, and a loss of `max_lost` in the probability
    that the model recalls what was planted in the text. Windows are ignored: a query sees fewer
    rows in a window, whatever the format.

    >>> text = "def double(number): return 2 * number; " * 100
    >>> kvant.probe(model, tokenizer, "affine8", text=text).harmless
    True
    """
    model = get_text_model(get_transformers_model(model))
    trial = make_trial(model, tokenizer, text, Tolerance(max_kl, max_lost))
    spec, evaluator = resolve_auto(model, spec, trial), SpecEvaluator(model, trial)
    divergence = evaluator.measure_divergence(spec)
    recall, recall_loss = evaluator.recall, evaluator.measure_recall_loss(spec)
    recommended, reason = spec, "it is harmless"
    if divergence.mean_kl > trial.max_kl or recall_loss > trial.max_lost:
        recommended, reason = _find_better_spec(evaluator, spec)
    formats, screen = make_unbounded_spec(model, spec), evaluator.screen
    results = (divergence, screen.measure_by_layer(formats), recall.raw_probability, recall_loss)
    limits = trial.max_kl, trial.max_lost
    example = None if tokenizer is None else find_example(screen, tokenizer, formats)
    return Probe(spec, *results, *limits, recommended, reason, example)


@dataclass(frozen=True)
class Choice:
    """The spec that `auto` stands for with a model, and the candidates in the order tried."""

    spec: str
    candidates: tuple[FormatTrial, ...]

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Choice:
        """Parse a stored choice; raise if one of its fields is invalid."""
        candidates = tuple(map(FormatTrial.from_json, fields["candidates"]))
        if fields["spec"] not in ("raw", *(candidate.spec for candidate in candidates)):
            raise ValueError(f"{fields['spec']!r} is not a format that was tried")
        parse_words(fields["spec"])
        return cls(fields["spec"], candidates)


def resolve_auto(
    model: PreTrainedModel,
    spec: AnySpec,
    trial: ProbeTrial,
    progress: ProbeProgress = ignore_progress,
) -> AnySpec:
    """Return `spec`, or the spec that `auto`, with or without limits, stands for with this model.

    The spec may set the limits, else the trial's apply: `auto,max_kl=0.01,max_lost=0.1`.
    """
    return choose_format(model, str(spec), trial, progress).spec if is_auto(spec) else spec


def choose_format(
    model: PreTrainedModel, spec: str, trial: ProbeTrial, progress: ProbeProgress = ignore_progress
) -> Choice:
    """Try formats, the smallest first, until one is harmless; or load the choice from disk.

    With a limit of bits, tune formats to it.
    """
    if (max_bits := parse_auto_bits(spec)) is not None:
        key = verdicts.make_key(model, trial.ids, "tune", max_bits)
        if (stored := verdicts.load(key, Choice.from_json)) is None:
            tuned = find_best_spec(model, trial, BitsLimit(max_bits), progress)
            stored = Choice(tuned.spec, tuple(_judge(t, trial.max_kl) for t in tuned.trials))
            verdicts.store(key, asdict(stored))
        return stored
    size, tolerance = parse_auto_size(spec), parse_auto_tolerance(spec, trial.tolerance)
    trial = replace(trial, tolerance=tolerance)
    conditions = "auto", size, trial.max_kl, trial.max_lost, bool(trial.make_exams())
    key = verdicts.make_key(model, trial.ids, *conditions)
    if (stored := verdicts.load(key, Choice.from_json)) is not None:
        return stored
    evaluator, candidates = SpecEvaluator(model, trial), list[FormatTrial]()

    def is_harmless(candidate: str) -> bool:
        progress(len(candidates), len(CANDIDATE_SPECS))
        candidates.append(evaluator.try_format(candidate))
        return candidates[-1].harmless

    context = max_context(model.config) or 8192
    smallest = find_smallest_spec(is_harmless, layer_shapes(model), context, size)
    choice = Choice(smallest, tuple(candidates))
    verdicts.store(key, asdict(choice))
    return choice


def _judge(measured: MeasuredSpec, max_kl: float) -> FormatTrial:
    """Judge a spec by its divergence; recall was not measured."""
    verdict = HARMLESS if measured.mean_kl <= max_kl else HARMFUL
    return FormatTrial(measured.spec, measured.mean_kl, measured.top1, None, verdict)


def _find_better_spec(evaluator: SpecEvaluator, spec: AnySpec) -> tuple[AnySpec, str]:
    if not isinstance(spec, str):
        return "raw", "kvant does not change recipes"
    *promotions, raw = list_promotions(spec)
    return next((pair for pair in promotions if evaluator.try_format(pair[0]).harmless), raw)


def format_spec(spec: AnySpec) -> str:
    return spec if isinstance(spec, str) else "these recipes"
