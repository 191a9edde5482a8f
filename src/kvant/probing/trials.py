"""Try specs on a model, on a text: what it predicts, and what it recalls.

A format may hardly change the predictions and still lose half of the recall, since few tokens
depend on distant ones. Raw results are computed once for all specs. A thousand tokens in a few
seconds are enough to find a format that breaks a model or its recall. They do not measure quality;
`kvant eval` does.

A trial is a text, or random tokens if there is no tokenizer. The default text is source code that
the built-in model was not trained on: a memorized text shows less divergence than any other.
Predictions of random tokens are uncertain, and divergences about ten times as large (5 to 11 times
for formats that do little harm to the built-in model). So the limit is ten times as large. Recall
is not tested there: its questions need a tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvant.demo import load_probe_prompts
from kvant.models import max_context
from kvant.probing.divergence import Divergence, make_unbounded_spec, measure_divergence
from kvant.probing.recall import RecallExam, RecallTest, make_exams
from kvant.probing.screen import MAX_SCREEN_TOKENS, QuickScreen
from kvant.probing.verdicts import assess
from kvant.recipes import AnySpec, iterate_attention
from kvant.spec.language import Tolerance

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
HARMLESS, HARMFUL, RECALLS_LESS = "harmless", "changes predictions", "recalls less"  # verdicts


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
        if not (formats.prunes or any(r.seals for r in iterate_attention(*formats.layers))):
            return FormatTrial(spec, 0.0, 1.0, 0.0, HARMLESS)  # raw
        for count, limit in (
            (FIRST_SCREEN_TOKENS, FIRST_SCREEN_KL_FACTOR * max_kl),
            (MAX_SCREEN_TOKENS, max_kl),
        ):
            divergence = self.screen.measure_divergence(formats, count)
            if divergence.mean_kl > limit:
                return FormatTrial(spec, divergence.mean_kl, divergence.top1, None, HARMFUL)
        lost = self.measure_recall_loss(spec)
        if lost > self.trial.max_lost:
            return FormatTrial(spec, divergence.mean_kl, divergence.top1, lost, RECALLS_LESS)
        if formats.prunes:
            divergence = self.measure_divergence(spec)
            harmless = divergence.mean_kl <= max_kl
            figures = divergence.mean_kl, divergence.top1
        else:
            verdict = assess(self.model, self.trial.ids, formats, max_kl)
            harmless, figures = bool(verdict.harmless), (verdict.mean_kl, verdict.top1)
        return FormatTrial(spec, *figures, lost, HARMLESS if harmless else HARMFUL)


# The smallest first; of equal sizes, formats without smoothing first. Without fp8, which loses more
# than smaller formats (docs/quality.md).
FORMAT_LADDER = (
    *("turbo2", "turbo3v2", "turbo3", "turbo4v2", "turbo4v3", "turbo4", "affine4"),
    *("affine5", "affine6", "affine8v4", "affine8"),
)
CANDIDATE_SPECS = tuple(spec for word in FORMAT_LADDER for spec in (word, f"{word},smooth"))
