"""A loud word where a chosen format does a model more harm than is tolerated; before it answers."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvant import hf
from kvant.errors import UnsupportedView
from kvant.hf.model_layers import get_model_layers, make_cache_spec
from kvant.probing import verdicts
from kvant.probing.assessment import ProbeProgress, Verdict, assess, ignore_progress
from kvant.probing.divergence import make_empty_cache, make_unbounded_spec
from kvant.probing.evaluator import FormatTrial, ProbeTrial, make_trial
from kvant.probing.recommendation import choose
from kvant.recipes import AnySpec, CacheSpec, iterate_attention
from kvant.spec.auto import is_auto
from kvant.spec.headers import dumps

log = logging.getLogger("kvant")
BUDGET = 2.0  # seconds that a start may take longer by a trial
RECALL_UNTESTED_WARNING = (
    "auto was chosen by predictions alone, which change little where a model forgets: give "
    "tokenizer=, and a model of 512 tokens or more, for what it recalls to be asked too"
)


def attach(
    model: nn.Module,
    spec: AnySpec = "raw",
    *,
    tokenizer: Any = None,
    guard: bool = True,
    backend: str | None = None,
) -> AttachedModel:
    """Let `model.generate(...)` use a cache with this spec, until `detach`, or in a `with`.

    A format is tried on the model first, for two seconds at most, on a text if there is a
    tokenizer. A warning names one that changes its predictions too much, and one of which that is
    still unknown; `guard=False` leaves that out. Verdicts are kept on disk, and not tried again.
    `auto` takes the smallest that does not, and that leaves the model what it recalls. A model
    inside a wrapper (torch.compile, peft) is attached itself, and with it the parts that it hands
    over to; a copy is attached by itself, also a pickled one. `backend` is the one that is to read
    every layer, else the first that can.

    >>> with kvant.attach(model, "affine8"):
    ...     ids = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4)
    >>> ids.shape[1] - inputs["input_ids"].shape[1]
    4
    """
    before = hf.get_attachments(model)
    found = attach_checked(model, spec, tokenizer, guard=guard, backend=backend)
    if found.warning is not None:
        warnings.warn(found.warning, stacklevel=2)
    return AttachedModel(model, before)


class AttachedModel:
    """A model that is attached: at the end of a `with`, it is again what it was."""

    def __init__(self, model: nn.Module, previous: Mapping[PreTrainedModel, Any]) -> None:
        self._model, self._previous = model, previous

    def __enter__(self) -> nn.Module:
        return self._model

    def __exit__(self, *error: object) -> None:
        _restore_attachments(self._model, self._previous)

    def __repr__(self) -> str:
        held = next(iter(hf.get_attachments(self._model).values()), None)
        told = "not attached any more" if held is None else repr(held.spec)
        return f"{type(self).__name__}({type(self._model).__name__}, {told})"


def _restore_attachments(model: nn.Module, previous: Mapping[PreTrainedModel, Any]) -> None:
    if hf.get_attachments(model):
        hf.detach(model)
    for part, held in previous.items():
        hf.attach(part, held.spec, backend=held.backend)


@dataclass(frozen=True)
class GuardedSpec:
    """The spec that a model is attached with, what to warn of, and what `auto` tried for it."""

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
    """Attach a model; after an error it is attached as it was before, or not at all.

    `progress(0, total)` says that a trial begins: none does where its verdict is known.
    """
    model = hf.get_transformers_model(model)
    before = hf.get_attachments(model)
    reader = hf.find_text_model(model)
    if reader is not None and not hf.has_cross_attention(reader):
        hf.get_support(reader).require_level(hf.SupportLevel.GENERATE)
    try:
        if is_auto(spec):
            return _attach_auto(model, spec, tokenizer, backend, progress)
        return GuardedSpec(spec, _attach_spec(model, spec, tokenizer, guard, backend, progress))
    except BaseException:
        if hf.get_attachments(model) != before:
            _restore_attachments(model, before)
        raise


def _attach_auto(
    model: PreTrainedModel,
    spec: AnySpec,
    tokenizer: Any,
    backend: str | None,
    progress: ProbeProgress,
) -> GuardedSpec:
    """Attached with what `auto` stands for; that it does no harm is just found out."""
    hf.attach(model, "raw")
    reading = hf.get_text_model(model)
    tried = make_trial(reading, tokenizer)
    found = choose(reading, str(spec), tried, progress)
    hf.attach(model, found.spec, backend=backend)
    return GuardedSpec(
        found.spec, None if tried.make_exams() else RECALL_UNTESTED_WARNING, found.candidates
    )


def _attach_spec(
    model: PreTrainedModel,
    spec: AnySpec,
    tokenizer: Any,
    guard: bool,
    backend: str | None,
    progress: ProbeProgress,
) -> str | None:
    hf.attach(model, spec, backend=backend)
    seals = any(
        one.seals
        for one in iterate_attention(*make_cache_spec(get_model_layers(model), spec).layers)
    )
    reader = hf.find_text_model(model) if guard and seals else None
    if reader is None:
        if guard and seals:
            log.info("the format was not tried on the model: tokens are not enough for it")
        return None
    return explain_harm(reader, spec, make_trial(reader, tokenizer), progress)


def explain_harm(
    model: PreTrainedModel,
    spec: AnySpec,
    trial: ProbeTrial,
    progress: ProbeProgress = ignore_progress,
) -> str | None:
    """Warn of a spec that changes what this model predicts, or of which that is unknown."""
    if hf.has_cross_attention(model):
        return None  # it continues no text
    try:
        # What goes by a rule, goes because somebody asked for it: formats are judged.
        formats = make_unbounded_spec(model, spec).map_layers(
            lambda layer: replace(layer, prune=None)
        )
        if not any(layer.seals for layer in iterate_attention(*formats.layers)):
            return None
        fitted = make_empty_cache(model, formats).spec  # its channel scales are part of its name
        found = _verdict(model, fitted, trial, progress)
    except UnsupportedView as error:  # attention of the model's own, which needs dense rows
        log.info("the format was not tried on the model: %s", error)
        return None
    word = spec if isinstance(spec, str) else "this cache"
    seen = f"{found.mean_kl:.2g} nats in the mean, where {trial.max_kl:.2g} is tolerated"
    if found.harmless is None:
        return (
            f"unknown what {word} does to {type(model).__name__}: {found.tokens} of "
            f"{found.total} tokens were read in {BUDGET:g} s ({seen}). `kvant eval`, or "
            "kvant.probe(model, tokenizer, spec), measures it"
        )
    if found.harmless:
        return None
    return (
        f"{word} changes what {type(model).__name__} predicts: {seen}. "
        "kvant.probe(model, tokenizer, spec) tells where and what to take instead; 'auto' takes "
        "the smallest format that does no harm"
    )


def _verdict(
    model: PreTrainedModel, formats: CacheSpec, tried: ProbeTrial, progress: ProbeProgress
) -> Verdict:
    """Read it from disk, or find it out and keep it, unless it is unknown."""
    key = verdicts.key_of(model, tried.ids, "format", dumps(formats), tried.max_kl)
    if (known := verdicts.load(key, Verdict.from_json)) is not None:
        return known
    found = assess(model, tried.ids, formats, tried.max_kl, seconds=BUDGET, progress=progress)
    if found.harmless is not None:
        verdicts.store(key, asdict(found))
    return found
