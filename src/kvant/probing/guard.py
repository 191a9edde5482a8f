"""A loud word where a chosen format does a model more harm than is tolerated; before it answers."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from transformers import PreTrainedModel

from kvant import hf
from kvant.errors import CacheError
from kvant.hf.detect import host_layers, recipes
from kvant.probing.finding import is_auto, resolved
from kvant.probing.predictions import damage
from kvant.probing.text import Trial, trial
from kvant.recipes import AnySpec, attention_in

log = logging.getLogger("kvant")


def attach(
    model: PreTrainedModel, spec: AnySpec = "raw", *, tokenizer: Any = None, guard: bool = True
) -> None:
    """Let `model.generate(...)` use a cache with this spec, until `detach`.

    The spec is tried on the model, on a text if there is a tokenizer, and what does harm is said in
    a warning; `guard=False` leaves that out. `auto` takes the smallest format that does none.
    """
    if is_auto(spec):
        hf.attach(model, "raw")
        spec = resolved(model, spec, trial(model, tokenizer))
    hf.attach(model, spec)
    told = harm(model, spec, trial(model, tokenizer)) if guard else None
    if told is not None:
        warnings.warn(told, stacklevel=2)


def harm(model: PreTrainedModel, spec: AnySpec, tried: Trial) -> str | None:
    """What is to be said of a spec that changes what this model predicts, or nothing."""
    layers = attention_in(*recipes(host_layers(model), spec).layers)
    if model.config.is_encoder_decoder or not any(layer.seals for layer in layers):
        return None
    try:
        found = damage(model, [tried.ids], spec)
    except CacheError as error:  # a model as it is, whose attention cannot tell tokens apart
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
