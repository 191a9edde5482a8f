"""A loud word where a chosen format does a model more harm than is tolerated; before it answers."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvant import hf
from kvant.errors import UnsupportedView
from kvant.hf.detect import host_layers, recipes
from kvant.probing.finding import Progress, resolved, silent
from kvant.probing.judgement import Trial, trial
from kvant.probing.predictions import divergence, unbounded
from kvant.recipes import AnySpec, attention_in
from kvant.spec.auto import is_auto

log = logging.getLogger("kvant")
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

    A format is tried on the model first, on a thousand tokens of a text if there is a tokenizer,
    and one that changes its predictions too much is said in a warning; `guard=False` leaves that
    out. `auto` takes the smallest that does not, and that leaves the model what it recalls. A model
    inside a wrapper (torch.compile, peft) is attached itself, and with it the parts that it hands
    over to; a copy is attached by itself, also a pickled one. `backend` is the one that is to read
    every layer, else the first that can.

    >>> with kvant.attach(model, "affine8"):
    ...     ids = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4)
    >>> ids.shape[1] - inputs["input_ids"].shape[1]
    4
    """
    before = hf.attachments(model)
    told = attached(model, spec, tokenizer, guard=guard, backend=backend)[1]
    if told is not None:
        warnings.warn(told, stacklevel=2)
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


def attached(
    model: nn.Module,
    spec: AnySpec,
    tokenizer: Any,
    *,
    guard: bool,
    backend: str | None = None,
    progress: Progress = silent,
) -> tuple[AnySpec, str | None]:
    """The spec that the model is attached with now, and what is to be said of it.

    After an error it is attached as it was before, or not at all.
    """
    model = hf.host_model(model)
    before = hf.attachments(model)
    reader = hf.reader(model)
    if reader is not None and not hf.crosses(reader):
        hf.support_of(reader).require(hf.Level.GENERATE)
    try:
        if is_auto(spec):
            return _chosen(model, spec, tokenizer, backend, progress)
        return spec, _attached(model, spec, tokenizer, guard, backend)
    except BaseException:
        if hf.attachments(model) != before:
            _put_back(model, before)
        raise


def _chosen(
    model: PreTrainedModel, spec: AnySpec, tokenizer: Any, backend: str | None, progress: Progress
) -> tuple[AnySpec, str | None]:
    """Attached with what `auto` stands for; that it does no harm is just found out."""
    hf.attach(model, "raw")
    reading = hf.continuing(model)
    tried = trial(reading, tokenizer)
    found = resolved(reading, spec, tried, progress)
    hf.attach(model, found, backend=backend)
    return found, None if tried.exams() else UNASKED


def _attached(
    model: PreTrainedModel, spec: AnySpec, tokenizer: Any, guard: bool, backend: str | None
) -> str | None:
    hf.attach(model, spec, backend=backend)
    seals = any(one.seals for one in attention_in(*recipes(host_layers(model), spec).layers))
    reader = hf.reader(model) if guard and seals else None
    if reader is None:
        if guard and seals:
            log.info("the format was not tried on the model: tokens are not enough for it")
        return None
    return harm(reader, spec, trial(reader, tokenizer))


def harm(model: PreTrainedModel, spec: AnySpec, tried: Trial) -> str | None:
    """What is to be said of a spec that changes what this model predicts, or nothing."""
    if hf.crosses(model):
        return None  # it continues no text
    try:
        # What goes by a rule, goes because somebody asked for it: formats are judged.
        formats = unbounded(model, spec).changed(lambda layer: replace(layer, prune=None))
        found = divergence(model, [tried.ids], formats)
    except UnsupportedView as error:  # attention of the model's own, which needs dense rows
        log.info("the format was not tried on the model: %s", error)
        return None
    if found.mean_kl <= tried.max_kl:
        return None
    return (
        f"{spec if isinstance(spec, str) else 'this cache'} changes what {type(model).__name__} "
        f"predicts: {found.mean_kl:.2g} nats in the mean, where {tried.max_kl:.2g} is tolerated. "
        "kvant.probe(model, tokenizer, spec) tells where and what to take instead; 'auto' takes "
        "the smallest format that does no harm"
    )
