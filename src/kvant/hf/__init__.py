"""Caches of kvant for models of Hugging Face transformers."""

from kvant.attention import explain
from kvant.hf.attach import (
    PairedCache,
    attach,
    cache_for,
    detach,
    explain_model,
    get_attachments,
    load_cache,
    make_model_cache,
    replace_method,
)
from kvant.hf.cache import TransformersCache
from kvant.hf.model import (
    TokenForward,
    check_text_model,
    compute_model_fingerprint,
    find_text_model,
    get_cache_argument,
    get_hidden_width,
    get_model_without_head,
    get_text_model,
    get_transformers_model,
    has_cross_attention,
    has_hooks,
    is_bidirectional,
    make_comparable,
    named_attributes,
    named_modules,
    supports_chunked_prefill,
    unwrap_model,
)
from kvant.hf.support import Support, SupportLevel, get_support

explain.register(TransformersCache, TransformersCache.explain)
explain.register(PairedCache, PairedCache.explain)

__all__ = [
    "PairedCache",
    "Support",
    "SupportLevel",
    "TokenForward",
    "TransformersCache",
    "attach",
    "cache_for",
    "check_text_model",
    "compute_model_fingerprint",
    "detach",
    "explain_model",
    "find_text_model",
    "get_attachments",
    "get_cache_argument",
    "get_hidden_width",
    "get_model_without_head",
    "get_support",
    "get_text_model",
    "get_transformers_model",
    "has_cross_attention",
    "has_hooks",
    "is_bidirectional",
    "load_cache",
    "make_comparable",
    "make_model_cache",
    "named_attributes",
    "named_modules",
    "replace_method",
    "supports_chunked_prefill",
    "unwrap_model",
]
