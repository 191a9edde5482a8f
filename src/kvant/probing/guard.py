"""Attach specs to models, and warn before generation if a format is too harmful."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvant import hf
from kvant.errors import UnsupportedView
from kvant.hf.model import get_model_layers, make_cache_spec
from kvant.platform.figures import describe_predictions
from kvant.probing import verdicts
from kvant.probing.advice import describe_harm
from kvant.probing.divergence import make_empty_cache, make_format_spec
from kvant.probing.recommendation import choose_format, format_spec
from kvant.probing.trials import HARMFUL, FormatTrial, ProbeTrial, make_trial
from kvant.probing.verdicts import ProbeProgress, Verdict, assess, ignore_progress
from kvant.recipes import AnySpec, iterate_attention
from kvant.replay import enable_replay
from kvant.spec import refuse_second_pass
from kvant.spec.headers import dumps
from kvant.spec.language import is_auto, parse_auto_bits
from kvant.spec.packages import list_extensions

log = logging.getLogger("kvant")
TRIAL_SECONDS = 2.0  # longest delay of a start by a trial; nothing is begun to explain it later
RECALL_UNTESTED_WARNING = (
    "auto was chosen by predictions alone, which change little when a model forgets: give "
    "tokenizer=, and a model of 512 tokens or more, to test recall too"
)


def attach(
    model: nn.Module,
    spec: AnySpec = "raw",
    *,
    tokenizer: Any = None,
    guard: bool = True,
    backend: str | None = None,
) -> AttachedModel:
    """Make `model.generate(...)` use a cache with this spec, until `detach` or a `with` ends.

    Tokens are replayed without Python where possible; `generate(disable_compile=True)` forbids it.
    The format is first tried on the model, for at most two seconds, on a text if there is a
    tokenizer. A warning explains a format that changes predictions too much (two seconds more or a
    little longer), or names one whose harm is still unknown; `guard=False` skips the trial.
    Verdicts are stored on disk and reused. `auto` takes the smallest format that is harmless to
    predictions and recall, `auto:3.25bits` what `kvant.tune` finds. If the model is wrapped
    (torch.compile, peft), the model inside is attached, with the parts that it delegates to. A
    deep copy or an unpickled model is attached independently. `backend` reads every layer; the
    default is the first that supports it.

    >>> with kvant.attach(model, "affine8"):
    ...     ids = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4)
    >>> ids.shape[1] - inputs["input_ids"].shape[1]
    4
    """
    if not is_auto(spec):  # `auto` never chooses a spec that prunes
        refuse_second_pass(
            make_cache_spec(get_model_layers(hf.get_transformers_model(model)), spec)
        )
    previous = hf.get_attachments(model)
    guarded = attach_checked(model, spec, tokenizer, guard=guard, backend=backend)
    try:
        if guarded.warning is not None:
            warnings.warn(guarded.warning, stacklevel=2)
        _enable_replay(hf.get_attachments(model))
    except BaseException:  # warnings may be errors
        _restore_attachments(model, previous)
        raise
    return AttachedModel(model, previous)


class AttachedModel:
    """An attached model; the end of a `with` restores its previous attachment."""

    def __init__(self, model: nn.Module, previous: Mapping[PreTrainedModel, Any]) -> None:
        self._model, self._previous = model, previous

    def __enter__(self) -> nn.Module:
        return self._model

    def __exit__(self, *error: object) -> None:
        _restore_attachments(self._model, self._previous)

    def __repr__(self) -> str:
        attachment = next(iter(hf.get_attachments(self._model).values()), None)
        state = "not attached any more" if attachment is None else repr(attachment.spec)
        return f"{type(self).__name__}({type(self._model).__name__}, {state})"


def _restore_attachments(model: nn.Module, previous: Mapping[PreTrainedModel, Any]) -> None:
    if hf.get_attachments(model):
        hf.detach(model)
    for part, attachment in previous.items():
        hf.attach(part, attachment.spec, backend=attachment.backend)
    _enable_replay(previous)


def _enable_replay(parts: Iterable[PreTrainedModel]) -> None:
    """Replay the tokens of attached parts, if kvant's own loop can run them, as a replay does."""
    for part in parts:
        if hf.find_text_model(part) is part:
            level = hf.get_support(part).level
            if level >= hf.SupportLevel.ONE_SEQUENCE:
                supports_padding = level >= hf.SupportLevel.RAGGED_BATCH
                enable_replay(part, supports_padding=supports_padding)


@dataclass(frozen=True)
class GuardedSpec:
    """The spec that a model is attached with, a warning, and the candidates of `auto`."""

    spec: AnySpec
    warning: str | None
    candidates: tuple[FormatTrial, ...] = ()


def attach_checked(
    model: nn.Module,
    spec: AnySpec,
    tokenizer: Any,
    *,
    guard: bool,
    backend: str | None = None,
    progress: ProbeProgress = ignore_progress,
) -> GuardedSpec:
    """Attach a model; after an error, restore its previous attachment.

    `progress(0, total)` reports the start of a trial; a stored verdict needs none.
    """
    model = hf.get_transformers_model(model)
    previous = hf.get_attachments(model)
    text_model = hf.find_text_model(model)
    if text_model is not None and not hf.has_cross_attention(text_model):
        hf.get_support(text_model).require_level(hf.SupportLevel.GENERATE)
    try:
        if is_auto(spec):
            hf.attach(model, "raw")
            text_model = hf.get_text_model(model)
            trial = make_trial(text_model, tokenizer)
            choice = choose_format(text_model, str(spec), trial, progress)
            hf.attach(model, choice.spec, backend=backend)
            if parse_auto_bits(str(spec)) is not None:  # the best in these bits may still harm
                warning = explain_harm(text_model, choice.spec, trial) if guard else None
            else:
                warning = None if trial.make_exams() else RECALL_UNTESTED_WARNING
            return GuardedSpec(choice.spec, warning, choice.candidates)
        hf.attach(model, spec, backend=backend)
        recipes = make_cache_spec(get_model_layers(model), spec).layers
        if not guard or not any(layer.seals for layer in iterate_attention(*recipes)):
            return GuardedSpec(spec, None)
        if text_model is None:
            log.info("the format was not tried on the model: it needs more input than tokens")
            return GuardedSpec(spec, None)
        trial = make_trial(text_model, tokenizer)
        return GuardedSpec(spec, explain_harm(text_model, spec, trial, progress))
    except BaseException:
        if hf.get_attachments(model) != previous:
            _restore_attachments(model, previous)
        raise


def explain_harm(
    model: PreTrainedModel,
    spec: AnySpec,
    trial: ProbeTrial,
    progress: ProbeProgress = ignore_progress,
) -> str | None:
    """Return a warning if a spec changes predictions too much, or if that is unknown."""
    if hf.has_cross_attention(model):
        return None  # an encoder-decoder does not continue a text
    try:
        # The trial is about formats: rows dropped by a rule are dropped on request.
        formats = make_format_spec(model, spec)
        if not any(layer.seals for layer in iterate_attention(*formats.layers)):
            return None
        fitted_spec = make_empty_cache(model, formats).spec  # the key includes channel scales
        name, conditions = format_spec(spec), ("format", dumps(fitted_spec), trial.max_kl)
        extensions = list_extensions(fitted_spec)
        key = None  # a codec that a program registers may be under development
        if all(extension.package is not None for extension in extensions):
            key = verdicts.make_key(model, trial.ids, *conditions, name, *extensions)
        verdict = verdicts.load(key, Verdict.from_json)
        if verdict is None:
            verdict = assess(
                model,
                trial.ids,
                fitted_spec,
                trial.max_kl,
                seconds=TRIAL_SECONDS,
                progress=progress,
            )
            if verdict.harmless is not None:  # else unknown
                verdicts.store(key, asdict(verdict))
        if verdict.harmless is False and not verdict.details:
            read_trial = replace(trial, ids=trial.ids[:, : verdict.tokens])
            details, is_complete = describe_harm(model, spec, read_trial, TRIAL_SECONDS)
            verdict = replace(verdict, details=details)
            if is_complete:  # else the next start has another try
                verdicts.store(key, asdict(verdict))
    except UnsupportedView as error:  # the model's own attention needs dense rows
        log.info("the format was not tried on the model: %s", error)
        return None
    model_name = type(model).__name__
    if verdict.harmless is None:
        return (
            f"no verdict on {name} for this {model_name}: in {TRIAL_SECONDS:g} s only "
            f"{verdict.tokens} of {verdict.total} tokens were read. To measure it: `kvant eval "
            f"--quick --model MODEL --formats {name}`, or kvant.probe(model, tokenizer, {name!r})"
        )
    if verdict.harmless:
        return None
    seen = describe_predictions(verdict.mean_kl, verdict.top1, trial.max_kl)
    return f"{name} {HARMFUL} of {model_name}: {seen}. {verdict.details}"
