"""kvant: the KV cache of a language model as a component of its own."""

from __future__ import annotations

from importlib import import_module
from os import PathLike
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import device as Device

from kvant import attention, functional
from kvant.attention import attend
from kvant.cache import Cache, files, merge
from kvant.cache.files import save
from kvant.cache.sequences import Sequences
from kvant.contracts import Mask, Tiles
from kvant.errors import (
    CacheError,
    CacheFileError,
    CapacityError,
    ContextError,
    EngineError,
    GrammarError,
    PromptError,
    RewindError,
    SnapshotMismatch,
    SpecError,
    UnknownSequence,
    UnsupportedView,
)
from kvant.models.shapes import Shape
from kvant.planner import Plan, plan
from kvant.recipes import CacheSpec, EmptySpec, GroupSpec, LayerSpec, RecurrentSpec, SharedSpec
from kvant.spec import parse
from kvant.weights import Packing, pack, unpack

if TYPE_CHECKING:
    from torch.nn import Module

    from kvant.engine import Engine, Result, Stream, Usage, generate_many
    from kvant.generation import Grammar, Messages, Session, Step, generate
    from kvant.hf import HostCache, cache_for, detach
    from kvant.prefixes import Prefixes
    from kvant.probing import Probe, attach, probe

__version__ = "0.1.0"

__all__ = [
    "Cache",
    "CacheError",
    "CacheFileError",
    "CacheSpec",
    "CapacityError",
    "ContextError",
    "EmptySpec",
    "Engine",
    "EngineError",
    "Grammar",
    "GrammarError",
    "GroupSpec",
    "LayerSpec",
    "Mask",
    "Messages",
    "Packing",
    "Plan",
    "Prefixes",
    "Probe",
    "PromptError",
    "RecurrentSpec",
    "Result",
    "RewindError",
    "Sequences",
    "Session",
    "Shape",
    "SharedSpec",
    "SnapshotMismatch",
    "SpecError",
    "Step",
    "Stream",
    "UnknownSequence",
    "UnsupportedView",
    "Usage",
    "attach",
    "attend",
    "cache_for",
    "detach",
    "explain",
    "functional",
    "generate",
    "generate_many",
    "load",
    "merge",
    "pack",
    "parse",
    "plan",
    "probe",
    "save",
    "unpack",
]


LATER = dict.fromkeys(("cache_for", "detach"), "kvant.hf")
LATER["Prefixes"] = "kvant.prefixes"
LATER |= dict.fromkeys(("Probe", "attach", "probe"), "kvant.probing")
LATER |= dict.fromkeys(("Grammar", "Messages", "Session", "Step", "generate"), "kvant.generation")
LATER |= dict.fromkeys(("Engine", "Result", "Stream", "Usage", "generate_many"), "kvant.engine")


@overload
def load(
    path: str | PathLike[str], *, device: str | Device = "cpu", tiles: Tiles | None = None
) -> Cache: ...
@overload
def load(
    path: str | PathLike[str], model: Module, *, device: str | Device | None = None
) -> HostCache: ...
def load(
    path: str | PathLike[str],
    model: Any = None,
    *,
    device: str | Device | None = None,
    tiles: Tiles | None = None,
) -> Any:
    """The cache in a file, in memory of its own; with a model, as `cache_for` gives it.

    >>> rows = torch.randn(1, 2, 10, 64)
    >>> cache = kvant.Cache(num_layers=1)
    >>> view = cache[0].append(rows, rows)
    >>> kvant.save(cache, "cache.kv")
    >>> kvant.load("cache.kv").length
    10
    """
    if model is None:
        return files.load(path, device=device or "cpu", tiles=tiles)
    if tiles is not None:
        raise ValueError("tiles beside a model: its cache lies as the model's backends like it")
    from kvant.hf import loaded

    return loaded(path, model, device)


def explain(what: Any) -> Any:
    """Which backend reads a view, a cache or a model, and why the others do not.

    A view says it of itself, a cache of transformers of its layers; of a model it is said how the
    cache that it is attached with would be read, or a raw one.

    >>> view = kvant.Cache(1, backend="reference")[0].append(*torch.randn(2, 1, 2, 10, 64))
    >>> print(kvant.explain(view))
    reference: reads this view
    >>> print(kvant.explain(model))
    layers 0-5, full_attention: raw; not read yet
    """
    if isinstance(what, torch.nn.Module):
        from kvant.hf import explain_model

        return explain_model(what)
    return attention.explain(what)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """What needs transformers is imported when it is asked for."""
    if name in LATER:
        return getattr(import_module(LATER[name]), name)
    raise AttributeError(f"module 'kvant' has no attribute {name!r}")
