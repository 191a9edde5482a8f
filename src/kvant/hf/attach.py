"""Attach kvant to a model, so that its plain `generate` uses a kvant cache; undo it with detach."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache as HFCache

from kvant.hf.attention import (
    find_attention_implementations,
    restore_implementations,
    set_kvant_implementations,
)
from kvant.hf.build import cache_for
from kvant.hf.latents import disable_folding, enable_folding, supports_folding
from kvant.hf.model import get_cache_argument, get_transformers_model, list_generating_parts
from kvant.hf.model_layers import find_latent_modules, get_model_layers, hides_padding
from kvant.recipes import AnySpec

PREPARE_CACHE_METHOD = "_prepare_cache_for_generation"
ATTACHMENT_ATTRIBUTE = "_kvant_attachment"


@dataclass
class Attachment:
    """The changes that `attach` made to a model."""

    spec: AnySpec
    backend: str | None = None
    implementations: list[tuple[PreTrainedConfig, str]] = field(default_factory=list)  # old names
    folded_modules: list[Any] = field(default_factory=list)  # with kvant's `expand_kv`


def attach(model: nn.Module, spec: AnySpec = "raw", *, backend: str | None = None) -> None:
    """Make `model.generate(...)` use a cache with this spec and backend, until `detach`.

    The model inside a wrapper is attached, and its parts that can generate. A copy of an attached
    model, pickled or not, is attached independently.
    """
    model = get_transformers_model(model)
    parts = list_generating_parts(model)
    for part in parts:
        cache_for(part, spec, backend=backend)  # refuse a bad spec before any change
    if any(ATTACHMENT_ATTRIBUTE in part.__dict__ for part in parts):
        detach(model)
    for part in parts:
        part.__dict__[ATTACHMENT_ATTRIBUTE] = Attachment(spec, backend)
        part.__dict__[PREPARE_CACHE_METHOD] = partial(_prepare_cache, part)
    attachment: Attachment = model.__dict__[ATTACHMENT_ATTRIBUTE]
    if any(layer.attends for layer in get_model_layers(model)):
        attachment.implementations = find_attention_implementations(model)
    set_kvant_implementations(attachment.implementations)
    for module in find_latent_modules(model):
        if supports_folding(module):
            enable_folding(module)
            attachment.folded_modules.append(module)


def detach(model: nn.Module) -> None:
    """Undo `attach`.

    >>> attached = kvant.attach(model, "affine8")
    >>> kvant.detach(model)
    >>> attached
    AttachedModel(Qwen3ForCausalLM, not attached any more)
    """
    attachments = get_attachments(model)
    if not attachments:
        raise ValueError(f"{type(get_transformers_model(model)).__name__} is not attached to kvant")
    for part, attachment in attachments.items():
        del part.__dict__[ATTACHMENT_ATTRIBUTE], part.__dict__[PREPARE_CACHE_METHOD]
        for module in attachment.folded_modules:
            disable_folding(module)
        restore_implementations(attachment.implementations)


def get_attachments(model: nn.Module) -> dict[PreTrainedModel, Attachment]:
    """Return the attachments of a model and its parts, the model's first."""
    parts = list_generating_parts(get_transformers_model(model))
    return {
        part: part.__dict__[ATTACHMENT_ATTRIBUTE]
        for part in parts
        if ATTACHMENT_ATTRIBUTE in part.__dict__
    }


def explain_model(model: nn.Module) -> str:
    """Explain how a cache of this model would be read: with its attached spec, else raw."""
    model = get_transformers_model(model)
    attachment = get_attachments(model).get(model)
    spec, backend = ("raw", None) if attachment is None else (attachment.spec, attachment.backend)
    return str(cache_for(model, spec, backend=backend).explain())


def _prepare_cache(
    self: Any,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Prepare a kvant cache in `generate`, in place of the transformers method."""
    name = get_cache_argument(self)
    cache: HFCache | None = model_kwargs.get(name)
    if cache is None and generation_config.use_cache is not False:
        implementation = generation_config.cache_implementation
        if implementation not in (None, self.generation_config.cache_implementation):
            raise ValueError(
                f"cache_implementation={implementation!r} on a model attached to kvant: leave it "
                "out, or call kvant.detach(model) first"
            )
        attachment: Attachment = self.__dict__[ATTACHMENT_ATTRIBUTE]
        mask: Tensor | None = model_kwargs.get("attention_mask") if hides_padding(self) else None
        backend = attachment.backend
        cache = cache_for(self, attachment.spec, attention_mask=mask, backend=backend)
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs[name] = cache
        return
    getattr(type(self), PREPARE_CACHE_METHOD)(
        self, generation_config, model_kwargs, *args, **kwargs
    )
