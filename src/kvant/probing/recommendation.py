"""`kvant.probe`: measure the harm of a spec, layer by layer, and recommend a better one.

A trial measures two things: what the model predicts and what it recalls. A format may hardly change
the predictions and still lose half of the recall, since few tokens depend on distant ones. Raw
results are computed once for all specs. A thousand tokens in a few seconds are enough to find a
format that breaks a model or its recall. They do not measure quality; `kvant eval` does.

A trial is a text, or random tokens if there is no tokenizer. The default text is source code that
the built-in model was not trained on: a memorized text shows less divergence than any other.
Predictions of random tokens are uncertain, and divergences about ten times as large (5 to 11 times
for formats that do little harm to the built-in model). So the limit is ten times as large. Recall
is not tested there: its questions need a tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvant.demo import load_probe_prompts
from kvant.errors import SpecError
from kvant.hf import get_text_model, get_transformers_model
from kvant.models import layer_shapes, max_context
from kvant.models.shapes import LayerShape
from kvant.planner import plan
from kvant.platform.sizes import format_size, parse_size
from kvant.probing import verdicts
from kvant.probing.divergence import Divergence, make_unbounded_spec, measure_divergence
from kvant.probing.example import Example, find_example
from kvant.probing.recall import RecallExam, RecallTest, make_exams
from kvant.probing.screen import MAX_SCREEN_TOKENS, QuickScreen
from kvant.probing.verdicts import ProbeProgress, assess, ignore_progress
from kvant.recipes import AnySpec
from kvant.retention import DEFAULT_WINDOW_SINKS
from kvant.spec.formats import SMOOTHABLE_FAMILIES, parse_format
from kvant.spec.language import (
    MAX_KL,
    MAX_LOST,
    Tolerance,
    is_auto,
    parse_auto_size,
    parse_auto_tolerance,
)

MAX_TRIAL_TOKENS = 1024  # of the text
MAX_CHARACTERS_PER_TOKEN = 8  # no tokenizer packs source code so densely
MIN_EXAM_TOKENS = 512  # fewer have no room for planted items, and lie mostly in a dense tail
NUM_EXAMS = 2  # texts with planted items
RANDOM_TOKENS_KL_SCALE = 10.0  # of the limit; see the measurements above

DEFAULT_TOLERANCE = Tolerance()


@dataclass(frozen=True)
class ProbeTrial:
    """Tokens [1, n], and the limits of harm on them."""

    ids: Tensor
    tolerance: Tolerance = DEFAULT_TOLERANCE
    tokenizer: Any = None
    kl_scale: float = 1.0  # factor of the divergence limit

    @property
    def max_kl(self) -> float:
        return self.tolerance.max_kl * self.kl_scale

    @property
    def max_lost(self) -> float:
        return self.tolerance.max_lost

    def make_exams(self) -> list[RecallExam]:
        """Make exams from the tokens; none if they are too few or there is no tokenizer."""
        if self.tokenizer is None or self.ids.shape[1] < MIN_EXAM_TOKENS:
            return []
        return make_exams(self.tokenizer, [self.ids], NUM_EXAMS, seed=0)


def make_trial(
    model: PreTrainedModel,
    tokenizer: Any = None,
    text: str | None = None,
    tolerance: Tolerance = DEFAULT_TOLERANCE,
) -> ProbeTrial:
    """Make a trial from the first tokens of a text; the default is the standard library."""
    count = min(MAX_TRIAL_TOKENS, max_context(model.config) or MAX_TRIAL_TOKENS)
    default_texts = load_probe_prompts() if text is None and tokenizer is not None else []
    if tokenizer is None or (text is None and not default_texts):  # Python without its sources
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocab_size, (1, count), generator=generator, device="cpu")
        return ProbeTrial(ids.to(model.device), tolerance, tokenizer, RANDOM_TOKENS_KL_SCALE)
    source = (
        "\n".join(reversed(default_texts))[: MAX_CHARACTERS_PER_TOKEN * MAX_TRIAL_TOKENS]
        if text is None
        else text
    )
    token_ids = [int(token) for token in tokenizer.encode(source)[:count]]
    if len(token_ids) < min(MIN_EXAM_TOKENS, count):
        raise ValueError(
            f"a text of {len(token_ids)} tokens is too short: give "
            f"{min(MIN_EXAM_TOKENS, count)} or more"
        )
    return ProbeTrial(torch.tensor([token_ids], device=model.device), tolerance, tokenizer)


FIRST_SCREEN_TOKENS = 16  # enough to reject a very harmful format:
FIRST_SCREEN_KL_FACTOR = 4.0  # one above this multiple of the limit
HARMLESS = "harmless"


@dataclass(frozen=True)
class FormatTrial:
    """A format that was tried on a model, and its verdict."""

    spec: str
    mean_kl: float  # nats, over the tokens that the verdict needed
    top1: float  # share of these whose most likely token stays
    lost: float | None  # loss of recall probability; None: not measured
    verdict: str

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> FormatTrial:
        """Parse a stored trial; raise if one of its fields is invalid."""
        lost = None if fields["lost"] is None else float(fields["lost"])
        numbers = float(fields["mean_kl"]), float(fields["top1"])
        return cls(str(fields["spec"]), *numbers, lost, str(fields["verdict"]))

    @property
    def harmless(self) -> bool:
        return self.verdict == HARMLESS


@dataclass(frozen=True)
class SpecEvaluator:
    """Evaluates specs on a trial of a model; ignores windows and capacities."""

    model: PreTrainedModel
    trial: ProbeTrial

    @cached_property
    def screen(self) -> QuickScreen:
        return QuickScreen.from_tokens(self.model, self.trial.ids)

    @cached_property
    def recall(self) -> RecallTest:
        return RecallTest.from_exams(self.model, self.trial.make_exams())

    def measure_divergence(self, spec: AnySpec) -> Divergence:
        return measure_divergence(
            self.model, [self.trial.ids], make_unbounded_spec(self.model, spec)
        )

    def measure_recall_loss(self, spec: AnySpec) -> float:
        return self.recall.measure_loss(make_unbounded_spec(self.model, spec))

    def try_format(self, spec: str) -> FormatTrial:
        """Try a format, the cheapest test first; stop at the first test that it fails."""
        formats, max_kl = make_unbounded_spec(self.model, spec), self.trial.max_kl
        for count, limit in (
            (FIRST_SCREEN_TOKENS, FIRST_SCREEN_KL_FACTOR * max_kl),
            (MAX_SCREEN_TOKENS, max_kl),
        ):
            divergence = self.screen.measure_divergence(formats, count)
            if divergence.mean_kl > limit:
                return FormatTrial(
                    spec, divergence.mean_kl, divergence.top1, None, "changes predictions"
                )
        lost = self.measure_recall_loss(spec)
        if lost > self.trial.max_lost:
            return FormatTrial(spec, divergence.mean_kl, divergence.top1, lost, "recalls less")
        if formats.prunes:
            divergence = self.measure_divergence(spec)
            harmless = divergence.mean_kl <= max_kl
            figures = divergence.mean_kl, divergence.top1
        else:
            verdict = assess(self.model, self.trial.ids, formats, max_kl)
            harmless, figures = bool(verdict.harmless), (verdict.mean_kl, verdict.top1)
        return FormatTrial(spec, *figures, lost, HARMLESS if harmless else "changes predictions")


# The smallest first; of equal sizes, formats without smoothing first.
FORMAT_LADDER = (
    *("turbo2", "turbo3v2", "turbo3", "turbo4v2", "turbo4v3", "turbo4", "affine4"),
    *("affine8v4", "affine6", "fp8", "affine8"),
)
CANDIDATE_SPECS = tuple(spec for word in FORMAT_LADDER for spec in (word, f"{word},smooth"))
SINKS_OPTION = f"sinks={DEFAULT_WINDOW_SINKS}"  # the usual number of attention sinks
TAIL_ROWS = 128  # the tail that is usually enough


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
    limits = [part for part in others if part.split("=")[0] in ("window", "sinks", "capacity")]
    yield _join_spec("affine8", limits, "smooth"), "keys and values need 8 bits"
    yield _join_spec("raw", limits), "every other format that was tried is harmful"


def _list_denser_options(options: list[str]) -> Iterator[tuple[list[str], str]]:
    """Yield options with dense first rows or a longer dense tail, each with its reason."""
    if not any(part.startswith(("sinks=", "window=", "capacity=")) for part in options):
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

    def __str__(self) -> str:
        worst = max(range(len(self.layers)), key=self.layers.__getitem__)
        name = format_spec(self.spec)
        example = "" if self.example is None else f"after {self.example.describe(name)}\n"
        return (
            f"{name}: mean divergence {self.divergence.mean_kl:.2g} nats (limit "
            f"{self.max_kl:.2g}), {self.divergence.quantile(0.999):.2g} at 1 of 1000 positions; "
            f"the most likely token stays at {self.divergence.top1:.1%}\n{example}"
            f"recall: probability {self.recalled - self.lost:.2f} of an answer, "
            f"{self.recalled:.2f} with raw (limit of the loss {self.max_lost:.2g})\n"
            f"layer {worst} alone: {self.layers[worst]:.2g} nats, the most of all layers\n"
            f"recommended: {format_spec(self.recommended)} ({self.why})"
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
        if fields["spec"] not in (*CANDIDATE_SPECS, "raw"):
            raise ValueError(f"{fields['spec']!r} is not a format that auto tries")
        return cls(fields["spec"], tuple(map(FormatTrial.from_json, fields["candidates"])))


def resolve_auto(
    model: PreTrainedModel,
    spec: AnySpec,
    trial: ProbeTrial,
    progress: ProbeProgress = ignore_progress,
) -> AnySpec:
    """Return `spec`, or the spec that `auto` or `auto:SIZE` stands for with this model.

    The spec may set the limits, else the trial's apply: `auto,max_kl=0.01,max_lost=0.1`.
    """
    return choose_format(model, str(spec), trial, progress).spec if is_auto(spec) else spec


def choose_format(
    model: PreTrainedModel, spec: str, trial: ProbeTrial, progress: ProbeProgress = ignore_progress
) -> Choice:
    """Try formats, the smallest first, until one is harmless; or load the choice from disk."""
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


def _find_better_spec(evaluator: SpecEvaluator, spec: AnySpec) -> tuple[AnySpec, str]:
    if not isinstance(spec, str):
        return "raw", "kvant does not change recipes"
    return next(pair for pair in list_promotions(spec) if evaluator.try_format(pair[0]).harmless)


def format_spec(spec: AnySpec) -> str:
    return spec if isinstance(spec, str) else "these recipes"
