"""Caches of kvant for models of Hugging Face transformers."""

from kvant.attention import explain
from kvant.hf.attach import attach, detach, explain_model, get_attachments
from kvant.hf.build import PairedCache, cache_for, load_cache
from kvant.hf.cache import TransformersCache
from kvant.hf.forward import TokenForward
from kvant.hf.model import (
    check_text_model,
    compute_model_fingerprint,
    find_text_model,
    get_cache_argument,
    get_text_model,
    get_transformers_model,
    unwrap_model,
)
from kvant.hf.model_layers import has_cross_attention, supports_chunked_prefill
from kvant.hf.module_attributes import make_comparable, named_attributes, named_modules
from kvant.hf.replay import (
    NATIVE_REPLAY,
    CaptureFunction,
    Replayer,
    capture_graph,
    make_capture_function,
)
from kvant.hf.support import Support, SupportLevel, get_support

explain.register(TransformersCache, TransformersCache.explain)
explain.register(PairedCache, PairedCache.explain)

__all__ = [
    "NATIVE_REPLAY",
    "CaptureFunction",
    "PairedCache",
    "Replayer",
    "Support",
    "SupportLevel",
    "TokenForward",
    "TransformersCache",
    "attach",
    "cache_for",
    "capture_graph",
    "check_text_model",
    "compute_model_fingerprint",
    "detach",
    "explain_model",
    "find_text_model",
    "get_attachments",
    "get_cache_argument",
    "get_support",
    "get_text_model",
    "get_transformers_model",
    "has_cross_attention",
    "load_cache",
    "make_capture_function",
    "make_comparable",
    "named_attributes",
    "named_modules",
    "supports_chunked_prefill",
    "unwrap_model",
]
