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
from kvant.hf.detect import host_layers, recipes
from kvant.probing import verdicts
from kvant.probing.assessment import Progress, Verdict, assess, silent
from kvant.probing.finding import choose
from kvant.probing.judgement import Candidate, Trial, trial
from kvant.probing.predictions import empty_cache, unbounded
from kvant.recipes import AnySpec, CacheSpec, attention_in
from kvant.spec.auto import is_auto
from kvant.spec.headers import dumps

log = logging.getLogger("kvant")
BUDGET = 2.0  # seconds that a start may take longer by a trial
UNASKED = (
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
) -> Attached:
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
    before = hf.attachments(model)
    found = attached(model, spec, tokenizer, guard=guard, backend=backend)
    if found.warning is not None:
        warnings.warn(found.warning, stacklevel=2)
    return Attached(model, before)


class Attached:
    """A model that is attached: at the end of a `with`, it is again what it was."""

    def __init__(self, model: nn.Module, before: Mapping[PreTrainedModel, Any]) -> None:
        self._model, self._before = model, before

    def __enter__(self) -> nn.Module:
        return self._model

    def __exit__(self, *error: object) -> None:
        _put_back(self._model, self._before)

    def __repr__(self) -> str:
        held = next(iter(hf.attachments(self._model).values()), None)
        told = "not attached any more" if held is None else repr(held.spec)
        return f"{type(self).__name__}({type(self._model).__name__}, {told})"


def _put_back(model: nn.Module, before: Mapping[PreTrainedModel, Any]) -> None:
    if hf.attachments(model):
        hf.detach(model)
    for part, held in before.items():
        hf.attach(part, held.spec, backend=held.backend)


@dataclass(frozen=True)
class Attachment:
    """The spec that a model is attached with, what to warn of, and what `auto` tried for it."""

    spec: AnySpec
    warning: str | None
    candidates: tuple[Candidate, ...] = ()


def attached(
    model: nn.Module,
    spec: AnySpec,
    tokenizer: Any,
    *,
    guard: bool,
    backend: str | None = None,
    progress: Progress = silent,
) -> Attachment:
    """Attach a model; after an error it is attached as it was before, or not at all.

    `progress(0, total)` says that a trial begins: none does where its verdict is known.
    """
    model = hf.host_model(model)
    before = hf.attachments(model)
    reader = hf.reader(model)
    if reader is not None and not hf.crosses(reader):
        hf.support_of(reader).require(hf.Level.GENERATE)
    try:
        if is_auto(spec):
            return _chosen(model, spec, tokenizer, backend, progress)
        return Attachment(spec, _attached(model, spec, tokenizer, guard, backend, progress))
    except BaseException:
        if hf.attachments(model) != before:
            _put_back(model, before)
        raise


def _chosen(
    model: PreTrainedModel, spec: AnySpec, tokenizer: Any, backend: str | None, progress: Progress
) -> Attachment:
    """Attached with what `auto` stands for; that it does no harm is just found out."""
    hf.attach(model, "raw")
    reading = hf.continuing(model)
    tried = trial(reading, tokenizer)
    found = choose(reading, str(spec), tried, progress)
    hf.attach(model, found.spec, backend=backend)
    return Attachment(found.spec, None if tried.exams() else UNASKED, found.candidates)


def _attached(
    model: PreTrainedModel,
    spec: AnySpec,
    tokenizer: Any,
    guard: bool,
    backend: str | None,
    progress: Progress,
) -> str | None:
    hf.attach(model, spec, backend=backend)
    seals = any(one.seals for one in attention_in(*recipes(host_layers(model), spec).layers))
    reader = hf.reader(model) if guard and seals else None
    if reader is None:
        if guard and seals:
            log.info("the format was not tried on the model: tokens are not enough for it")
        return None
    return harm(reader, spec, trial(reader, tokenizer), progress)


def harm(
    model: PreTrainedModel, spec: AnySpec, tried: Trial, progress: Progress = silent
) -> str | None:
    """Warn of a spec that changes what this model predicts, or of which that is unknown."""
    if hf.crosses(model):
        return None  # it continues no text
    try:
        # What goes by a rule, goes because somebody asked for it: formats are judged.
        formats = unbounded(model, spec).changed(lambda layer: replace(layer, prune=None))
        if not any(layer.seals for layer in attention_in(*formats.layers)):
            return None
        fitted = empty_cache(model, formats).spec  # its channel scales are part of its name
        found = _verdict(model, fitted, tried, progress)
    except UnsupportedView as error:  # attention of the model's own, which needs dense rows
        log.info("the format was not tried on the model: %s", error)
        return None
    word = spec if isinstance(spec, str) else "this cache"
    seen = f"{found.mean_kl:.2g} nats in the mean, where {tried.max_kl:.2g} is tolerated"
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
    model: PreTrainedModel, formats: CacheSpec, tried: Trial, progress: Progress
) -> Verdict:
    """Read it from disk, or find it out and keep it, unless it is unknown."""
    key = verdicts.key_of(model, tried.ids, "format", dumps(formats), tried.max_kl)
    if (known := verdicts.load(key, Verdict.from_json)) is not None:
        return known
    found = assess(model, tried.ids, formats, tried.max_kl, seconds=BUDGET, progress=progress)
    if found.harmless is not None:
        verdicts.store(key, asdict(found))
    return found
