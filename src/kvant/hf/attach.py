"""Attach kvant to a model, so that its plain `generate` uses a kvant cache; undo it with detach."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from importlib.metadata import requires, version
from typing import Any

import torch
from packaging.requirements import Requirement
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache as HFCache
from transformers.cache_utils import EncoderDecoderCache

from kvant.cache import files
from kvant.errors import CacheError
from kvant.hf.attention import (
    disable_folding,
    enable_folding,
    find_attention_implementations,
    restore_implementations,
    set_kvant_implementations,
)
from kvant.hf.cache import TransformersCache
from kvant.hf.cache_context import CacheExplanation
from kvant.hf.masks import find_left_padding
from kvant.hf.model import (
    check_cross_attention,
    get_cache_argument,
    get_model_layers,
    get_transformers_model,
    has_cross_attention,
    ignores_padding,
    list_generating_parts,
    make_cache_spec,
)
from kvant.hf.smoothing import fit_smooth_frames
from kvant.recipes import AnySpec
from kvant.spec import refuse_second_pass

log = logging.getLogger("kvant")


@lru_cache(maxsize=1)
def check_transformers_version() -> None:
    """Warn once if transformers is outside the version range in kvant's extra `known`."""
    requirements = [Requirement(line) for line in requires("kvant") or ()]
    tested = next((r for r in requirements if r.marker and "known" in str(r.marker)), None)
    installed = version("transformers")
    if tested is not None and not tested.specifier.contains(installed, prereleases=True):
        log.warning(
            "transformers %s is outside %s, the versions that kvant is known to work with",
            installed,
            tested.specifier,
        )


class PairedCache(EncoderDecoderCache):
    """The caches of an encoder-decoder model: one for self-attention, one for cross-attention.

    The rows of cross-attention come from the encoder and are written once.
    """

    self_attention_cache: TransformersCache
    cross_attention_cache: TransformersCache

    def check_dynamic_cache(self, method: str) -> None:
        """Allow every method; the base class allows some only for a DynamicCache."""

    def fork(self) -> PairedCache:
        """Return a copy that shares pages until either cache writes to them."""
        copy = PairedCache(self.self_attention_cache.fork(), self.cross_attention_cache.fork())
        copy.is_updated = dict(self.is_updated)
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> PairedCache:
        return self.fork()

    def trim(self, count: int) -> int:
        """Drop up to `count` of the newest generated tokens, and return their number."""
        return self.self_attention_cache.trim(count)

    def clear(self) -> None:
        """Drop all tokens, those of the encoder included, and free the memory."""
        self.reset()
        self.self_attention_cache.clear()
        self.cross_attention_cache.clear()

    def stats(self) -> dict[str, Any]:
        """Return the statistics of both caches."""
        return {
            "self": self.self_attention_cache.stats(),
            "cross": self.cross_attention_cache.stats(),
        }

    def explain(self) -> CacheExplanation:
        """Explain how each layer of both caches is stored and read."""
        decoder, encoder = self.self_attention_cache.explain(), self.cross_attention_cache.explain()
        return CacheExplanation(
            tuple(f"rows of the decoder: {line}" for line in decoder.lines)
            + tuple(f"rows of the encoder: {line}" for line in encoder.lines)
        )


def cache_for(
    model: nn.Module,
    spec: AnySpec = "raw",
    *,
    attention_mask: Tensor | None = None,
    backend: str | None = None,
) -> TransformersCache | PairedCache:
    """Make an empty cache for `model.generate(..., cache=cache)`.

    `backend` ("reference", "native", "triton") reads every layer; by default each layer uses the
    first backend that can.

    A left-padded batch needs its `attention_mask` here only if the spec has sinks or a prune, since
    which rows are kept then depends on where each sequence starts.

    >>> cache = kvant.cache_for(model, "affine8")
    >>> ids = model.generate(**inputs, cache=cache, max_new_tokens=4)
    >>> cache.get_seq_length() == ids.shape[1] - 1  # the last token is not cached
    True
    """
    cache = make_model_cache(model, spec, attention_mask=attention_mask, backend=backend)
    own = cache.self_attention_cache if isinstance(cache, PairedCache) else cache
    refuse_second_pass(own.spec)
    return cache


def make_model_cache(
    model: nn.Module,
    spec: AnySpec,
    *,
    attention_mask: Tensor | None = None,
    backend: str | None = None,
) -> TransformersCache | PairedCache:
    """Make the cache of `cache_for`, but allow prunes whose score needs a second pass of the model.

    The caller runs that pass.
    """
    check_transformers_version()
    hf_model = get_transformers_model(model)
    layers = get_model_layers(hf_model)
    cache_spec = fit_smooth_frames(hf_model, make_cache_spec(layers, spec))
    attachable = bool(find_attention_implementations(hf_model))
    # In an encoder-decoder model, `attention_mask` belongs to the encoder, not to the cached text.
    mask = None if hf_model.config.is_encoder_decoder else attention_mask
    padding = columns = None
    if mask is not None:
        if mask.ndim != 2:
            raise ValueError(f"attention_mask {list(mask.shape)}: [sequences, tokens] is needed")
        padding, columns = find_left_padding(mask.bool()), mask.shape[1]
    cache = TransformersCache(
        layers, cache_spec, padding=padding, columns=columns, attachable=attachable
    )
    cache.backend = backend
    if not has_cross_attention(hf_model):
        return cache
    check_cross_attention(hf_model, cache_spec)
    # Every query reads all rows of an encoder: neither selection nor pruning applies.
    cross_spec = cache_spec.map_layers(lambda layer: replace(layer, select=None, prune=None))
    cross = TransformersCache(layers, cross_spec, is_cross=True, attachable=attachable)
    cross.backend = backend
    return PairedCache(cache, cross)


def load_cache(
    path: str | os.PathLike[str], model: PreTrainedModel, device: str | torch.device | None = None
) -> TransformersCache:
    """Load a saved cache for `model`."""
    hf_model = get_transformers_model(model)
    saved = files.read(path, device=hf_model.device if device is None else device)
    with files.convert_errors(path):
        cache = make_model_cache(hf_model, saved.spec)
        if not isinstance(cache, TransformersCache):
            raise CacheError(
                f"{type(hf_model).__name__} reads an encoder: its cache cannot be saved or loaded"
            )
        cache.restore(saved.snapshot)
    return cache


PREPARE_CACHE_METHOD = "_prepare_cache_for_generation"
ATTACHMENT_ATTRIBUTE = "_kvant_attachment"


@dataclass
class Attachment:
    """The changes that `attach` made to a model."""

    spec: AnySpec
    backend: str | None = None
    # Configurations, each with the name of its attention before `attach`.
    implementations: list[tuple[PreTrainedConfig, str]] = field(default_factory=list)
    # With latents folded into queries, by kvant's `expand_kv`.
    folded_modules: list[Any] = field(default_factory=list)
    # Methods of the model's class that the instance overrides. The default is for attachments
    # that earlier versions pickled, which lack this field.
    replaced_methods: tuple[str, ...] = (PREPARE_CACHE_METHOD,)


def attach(model: nn.Module, spec: AnySpec = "raw", *, backend: str | None = None) -> None:
    """Make `model.generate(...)` use a cache with this spec and backend, until `detach`.

    `kvant.attach` calls this, and also tries the spec on the model.

    If `model` is a wrapper, the model inside is attached. So are its parts that have a `generate`
    of their own. A copy of an attached model, by `deepcopy` or `pickle`, has its own attachment.
    """
    model = get_transformers_model(model)
    parts = list_generating_parts(model)
    for part in parts:
        make_model_cache(part, spec, backend=backend)  # refuse a bad spec before any change
    if any(ATTACHMENT_ATTRIBUTE in part.__dict__ for part in parts):
        detach(model)
    for part in parts:
        part.__dict__[ATTACHMENT_ATTRIBUTE] = Attachment(spec, backend)
        replace_method(part, PREPARE_CACHE_METHOD, _prepare_cache)
    attachment: Attachment = model.__dict__[ATTACHMENT_ATTRIBUTE]
    if any(layer.attends for layer in get_model_layers(model)):
        attachment.implementations = set_kvant_implementations(model)
    attachment.folded_modules = enable_folding(model)


def replace_method(part: PreTrainedModel, name: str, function: Callable[..., Any]) -> None:
    """Replace a method of an attached model, until `detach`; `function` gets the model first."""
    attachment: Attachment = part.__dict__[ATTACHMENT_ATTRIBUTE]
    if name not in attachment.replaced_methods:
        attachment.replaced_methods += (name,)
    part.__dict__[name] = partial(function, part)


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
        for name in (ATTACHMENT_ATTRIBUTE, *attachment.replaced_methods):
            del part.__dict__[name]
        disable_folding(attachment.folded_modules)
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
    return str(make_model_cache(model, spec, backend=backend).explain())


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
        mask: Tensor | None = model_kwargs.get("attention_mask") if ignores_padding(self) else None
        backend = attachment.backend
        cache = cache_for(self, attachment.spec, attention_mask=mask, backend=backend)
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs[name] = cache
        return
    getattr(type(self), PREPARE_CACHE_METHOD)(
        self, generation_config, model_kwargs, *args, **kwargs
    )
    if generation_config.is_assistant and cache is not None:  # passed on from an earlier call
        cache.activate_past_recording()
