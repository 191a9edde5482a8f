"""The cache of a model: integers once a forward, tensors in layers, pages in pools."""

from kvant.attention import explain
from kvant.cache.cache import Cache, merge
from kvant.cache.contents import Group
from kvant.cache.explaining import explain_cache
from kvant.cache.layer import Attention
from kvant.cache.recode import attending, spec_after, within
from kvant.cache.recurrent import Recurrent

explain.register(Cache, explain_cache)

__all__ = [
    "Attention",
    "Cache",
    "Group",
    "Recurrent",
    "attending",
    "merge",
    "spec_after",
    "within",
]
