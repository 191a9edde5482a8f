"""kvant: the KV cache of a language model as a component of its own."""

from kvant.attention import attend, explain
from kvant.cache import Cache
from kvant.contracts import Mask
from kvant.errors import (
    CacheError,
    CacheFileError,
    CapacityError,
    RewindError,
    SnapshotMismatch,
    SpecError,
    UnsupportedView,
)
from kvant.files import load, save
from kvant.planner import Plan, plan
from kvant.recipes import CacheSpec, EmptySpec, GroupSpec, LayerSpec, RecurrentSpec, SharedSpec
from kvant.shapes import Shape
from kvant.spec import parse

__version__ = "0.1.0"

__all__ = [
    "Cache",
    "CacheError",
    "CacheFileError",
    "CacheSpec",
    "CapacityError",
    "EmptySpec",
    "GroupSpec",
    "LayerSpec",
    "Mask",
    "Plan",
    "RecurrentSpec",
    "RewindError",
    "Shape",
    "SharedSpec",
    "SnapshotMismatch",
    "SpecError",
    "UnsupportedView",
    "attend",
    "explain",
    "load",
    "parse",
    "plan",
    "save",
]
