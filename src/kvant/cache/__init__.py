"""The cache of a model: integers once a forward, tensors in layers, pages in pools."""

from kvant.cache.cache import Cache, merge
from kvant.cache.contents import Group
from kvant.cache.layer import Attention
from kvant.cache.recurrent import Recurrent
from kvant.cache.succession import attending, succeeding, within

__all__ = [
    "Attention",
    "Cache",
    "Group",
    "Recurrent",
    "attending",
    "merge",
    "succeeding",
    "within",
]
