"""kvant in the hands of Hugging Face transformers."""

from kvant.attention import explain
from kvant.hf.attach import attach, detach
from kvant.hf.build import cache_for
from kvant.hf.cache import HostCache
from kvant.hf.detect import continues
from kvant.hf.encoder_decoder import PairedCache
from kvant.hf.identity import identity

explain.register(HostCache, HostCache.explain)
explain.register(PairedCache, PairedCache.explain)

__all__ = ["HostCache", "PairedCache", "attach", "cache_for", "continues", "detach", "identity"]
