"""kvant in the hands of Hugging Face transformers."""

from kvant.hf.attach import attach, detach
from kvant.hf.build import cache_for
from kvant.hf.cache import HostCache
from kvant.hf.encoder_decoder import PairedCache

__all__ = ["HostCache", "PairedCache", "attach", "cache_for", "detach"]
