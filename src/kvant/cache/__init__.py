"""The KV cache of a model: page tables per layer group, tensors per layer, slots in pools."""

from kvant.attention import explain
from kvant.cache.cache import Cache, merge
from kvant.cache.layers import GroupLayer, PagedLayer
from kvant.cache.recode import constrain_spec, list_attention_layers, replace_formats
from kvant.cache.recurrent_layer import RecurrentLayer
from kvant.cache.reports import explain_cache

explain.register(Cache, explain_cache)

__all__ = [
    "Cache",
    "GroupLayer",
    "PagedLayer",
    "RecurrentLayer",
    "constrain_spec",
    "list_attention_layers",
    "merge",
    "replace_formats",
]
